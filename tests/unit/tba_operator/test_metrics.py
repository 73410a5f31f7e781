"""Series that live as long as their job, and the HTTP server around them."""

import asyncio
import weakref

import aiohttp
from support.jobs import smallest

from tba_operator.api import parse_job, parse_status
from tba_operator.metrics import Metrics, serve

FINISHED = {
    "phase": "Complete",
    "startTime": "2027-01-15T08:00:00Z",
    "completionTime": "2027-01-15T08:10:00Z",
    "conditions": [
        {"type": "Complete", "status": "True", "reason": "TrainerSucceeded", "lastTransitionTime": "x"},
        {"type": "Degraded", "status": "False", "reason": "Fine", "lastTransitionTime": "x"},
    ],
}


def job(name="gsm8k"):
    data = smallest()
    data["metadata"] = {"name": name, "namespace": "ns"}
    return parse_job(data)


def value(metrics: Metrics, series: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(series, labels)


def test_a_job_has_one_series_for_each_condition():
    metrics = Metrics()
    metrics.set_job(job(), parse_status(FINISHED))
    known = {"namespace": "ns", "name": "gsm8k"}
    assert value(metrics, "tba_job_condition", type="Complete", status="True", **known) == 1
    assert value(metrics, "tba_job_condition", type="Complete", status="False", **known) is None
    assert value(metrics, "tba_job_condition", type="Degraded", status="False", **known) == 1
    assert value(metrics, "tba_job_execution_duration_seconds", result="Complete", **known) == 600


def test_a_job_that_changes_leaves_no_series_behind():
    metrics = Metrics()
    known = {"namespace": "ns", "name": "gsm8k"}
    about = {"model": "hf://a/b", "objective": "TrajectoryBalance", "engine": "vllm", **known}
    metrics.set_job(job(), parse_status({"phase": "Running"}))
    assert value(metrics, "tba_job_info", phase="Running", **about) == 1
    metrics.set_job(job(), parse_status(FINISHED))
    assert value(metrics, "tba_job_info", phase="Running", **about) is None
    assert value(metrics, "tba_job_info", phase="Complete", **about) == 1


def test_a_job_is_not_kept_for_its_series():
    metrics, known = Metrics(), job()
    metrics.set_job(known, parse_status(FINISHED))
    kept = weakref.ref(known.spec)
    del known
    assert kept() is None and 'name="gsm8k"' in metrics.render().decode()


def test_a_forgotten_job_has_no_series():
    metrics = Metrics()
    metrics.set_job(job("a"), parse_status(FINISHED))
    metrics.set_job(job("b"), parse_status(FINISHED))
    metrics.forget(("ns", "a"))
    metrics.forget(("ns", "never-known"))
    text = metrics.render().decode()
    assert 'name="a"' not in text and 'name="b"' in text


def test_a_running_job_has_no_duration_yet():
    metrics = Metrics()
    metrics.set_job(job(), parse_status({"startTime": "2027-01-15T08:00:00Z"}))
    assert "tba_job_execution_duration_seconds{" not in metrics.render().decode()


def test_watch_ages_grow_until_they_are_heard_of():
    now = [0.0]
    metrics = Metrics(clock=lambda: now[0])
    metrics.watch_heard("pods")
    now[0] = 40.0
    metrics.watch_heard("tbajobs")
    now[0] = 50.0
    assert metrics.watch_ages() == {"pods": 50.0, "tbajobs": 10.0}
    assert value(metrics, "tba_watch_age_seconds", kind="pods") == 50.0
    metrics.watch_heard("pods")
    assert value(metrics, "tba_watch_age_seconds", kind="pods") == 0.0


def test_counters_and_gauges_have_the_names_of_the_interface():
    metrics = Metrics()
    metrics.follow(queue_depth=lambda: 3, leading=lambda: True)
    metrics.count_error("Unavailable")
    metrics.count_request("apply", "StatefulSet", "ok")
    with metrics.reconcile_timer():
        pass
    assert value(metrics, "tba_queue_depth") == 3
    assert value(metrics, "tba_leader") == 1
    assert value(metrics, "tba_reconcile_errors_total", kind="Unavailable") == 1
    assert value(metrics, "tba_api_requests_total", verb="apply", kind="StatefulSet", outcome="ok") == 1
    assert value(metrics, "tba_reconcile_seconds_count") == 1


def test_probes_and_metrics_are_served():
    state = {"healthy": True, "ready": False}

    async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
        async with session.get(path) as answer:
            return answer.status, await answer.text()

    async def main() -> None:
        metrics = Metrics()
        metrics.set_job(job(), parse_status(FINISHED))
        healthy, ready = (lambda: (state["healthy"], "fine")), (lambda: (state["ready"], "no Lease"))
        async with (
            serve(metrics, port=0, healthy=healthy, ready=ready) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        ):
            assert await get(session, "/healthz") == (200, "fine\n")
            assert await get(session, "/readyz") == (503, "no Lease\n")
            state.update(healthy=False, ready=True)
            assert await get(session, "/healthz") == (503, "fine\n")
            assert (await get(session, "/readyz"))[0] == 200
            code, text = await get(session, "/metrics")
            assert code == 200 and "tba_job_info{" in text and "process_resident_memory_bytes" in text
            assert (await get(session, "/"))[0] == 404

    asyncio.run(main())
