import asyncio

import pytest
from support.kube_fake import FakeKube
from support.raw_pods import raw_pod
from support.simulated_time import now, run

from tba_operator import handlers
from tba_operator.caches import Caches
from tba_operator.controller import TERMINATING_SECONDS, stale_watches, vanished, work
from tba_operator.kubeapi import (
    Conflict,
    NamespaceTerminating,
    NotLeading,
    TooManyRequests,
    Unavailable,
)
from tba_operator.metrics import Metrics
from tba_operator.podstate import pod_of
from tba_operator.queue import WorkQueue

KEY = ("default", "gsm8k")


def passes(*results, until=100.0):
    """Seconds at which a job's passes began, if they end with `results` in turn and then for good."""
    began, left = [], list(results)

    async def reconcile(key):
        began.append(round(now(), 3))
        result = left.pop(0) if left else None
        if isinstance(result, Exception):
            raise result
        return result

    async def simulated():
        queue = WorkQueue(jitter=lambda: 0.0)
        worker = asyncio.create_task(work(queue, reconcile, metrics))
        queue.add(KEY)
        await asyncio.sleep(until)
        queue.close()
        await worker

    metrics = Metrics()
    run(simulated())
    return began, metrics


def test_a_job_is_looked_at_again_when_its_pass_asked_for_it():
    assert passes(10.0, 5.0)[0] == [0.0, 10.0, 15.0]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (NamespaceTerminating("going"), TERMINATING_SECONDS),
        (TooManyRequests("slow down", 7.0), 7.0),
        (Conflict("later"), 0.2),
        (Unavailable("down"), 0.2),
        (ValueError("bug"), 0.2),
    ],
)
def test_what_a_pass_fails_with_decides_when_it_is_tried_again(error, again):
    began, metrics = passes(error)
    assert began == [0.0, again]
    assert f'tba_reconcile_errors_total{{kind="{type(error).__name__}"}} 1.0'.encode() in metrics.render()


def test_failures_back_off_and_a_success_forgets_them():
    down = Unavailable("down")
    assert passes(down, down, down, 10.0, down)[0] == [0.0, 0.2, 0.6, 1.4, 11.4, 11.6]


def test_a_terminating_namespace_is_no_reason_to_back_off():
    going = NamespaceTerminating("going")
    assert passes(going, going)[0] == [0.0, 30.0, 60.0]


def test_a_worker_that_may_not_write_any_more_ends():
    assert passes(NotLeading("lost"), until=1.0)[0] == [0.0]


def indexed(*pods):
    return Caches({}, {}, {KEY: [pod_of(pod) for pod in pods]})


def test_what_only_the_indices_have_is_gone():
    api = FakeKube()
    here, gone = raw_pod("searcher", "here"), raw_pod("searcher", "gone")
    api.put(here)
    found = asyncio.run(vanished(api, indexed(here, gone), handlers.PODS, ()))
    assert found == {"uid-gone": KEY}


def test_what_appeared_since_is_not_gone():
    api = FakeKube()
    api.put(raw_pod("searcher", "new"))
    assert asyncio.run(vanished(api, indexed(), handlers.PODS, ())) == {}


def test_all_watched_namespaces_are_listed():
    api = FakeKube()
    a, b = raw_pod("searcher", "a", namespace="a"), raw_pod("searcher", "b", namespace="b")
    api.put(a)
    api.put(b)
    assert asyncio.run(vanished(api, indexed(a, b), handlers.PODS, ("a", "b"))) == {}


def test_a_watch_is_stale_when_it_was_not_answered_for_three_minutes():
    clock = [0.0]
    metrics = Metrics(clock=lambda: clock[0])
    metrics.watch_heard("pods")
    clock[0] = 179.0
    metrics.watch_heard("jobs")
    assert stale_watches(metrics) == {}
    clock[0] = 181.0
    assert stale_watches(metrics) == {"pods": 181.0}
