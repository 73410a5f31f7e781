import asyncio
import os
import subprocess
import sys

import pytest
from aiohttp import ClientSession
from structlog.testing import capture_logs
from support.kube_fake import FakeKube
from support.raw_pods import raw_pod
from support.simulated_time import now, run

from tba_operator.controller import TERMINATING_SECONDS, Controller, stale_watches, work
from tba_operator.kubeapi import (
    Access,
    Conflict,
    NamespaceTerminating,
    NotFound,
    NotLeading,
    TooManyRequests,
    Unavailable,
)
from tba_operator.metrics import Metrics
from tba_operator.mirror import Mirror, Stream
from tba_operator.queue import WorkQueue
from tba_operator.world import Settings

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


@pytest.mark.parametrize(("error", "lines"), [(NotFound("no kind Workload"), 1), (Conflict("later"), 0)])
def test_what_is_missing_is_logged_and_a_faster_writer_is_not(error, lines):
    with capture_logs() as logged:
        passes(error)
    assert len([line for line in logged if line["event"] == "reconcile_failed"]) == lines


def test_nothing_is_polled_before_all_kinds_were_listed():
    """Else a job would be queued whose StatefulSet has not been shown: it would be written anew, and rolled."""

    async def simulated():
        api, mirror = FakeKube(), Mirror({"pods": Stream("Pod", None)}, lambda key: None)
        controller = Controller(api, Settings(progress_through_api=True), Metrics())
        trainer = raw_pod(status={"podIP": "10.0.0.7"})
        mirror.page("pods", [trainer["metadata"]["uid"]], first=True, last=False)
        mirror.show(trainer)
        async with ClientSession() as session:
            tasks = [asyncio.create_task(part) for part in controller._parts(mirror, session, False)]
            await asyncio.sleep(5)
            early = set(api.accesses)
            mirror.page("pods", [], first=False, last=True)
            await asyncio.sleep(5)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return early, api.accesses

    assert run(simulated()) == (set(), {Access("", "pods/proxy", "get")})


def test_a_worker_that_may_not_write_any_more_ends():
    assert passes(NotLeading("lost"), until=1.0)[0] == [0.0]


AS_NOBODY = """
import asyncio, os
from support.kube_fake import FakeKube
from tba_operator.controller import Controller
from tba_operator.metrics import Metrics
from tba_operator.world import Settings
os.setuid(54321)
async def lead():
    await Controller(FakeKube(), Settings(identity="pod-1"), Metrics()).run(lambda: os._exit(7))
asyncio.run(lead())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_name_may_run_it():
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7, done.stderr


def test_a_watch_is_stale_when_it_was_not_answered_for_three_minutes():
    clock = [0.0]
    metrics = Metrics(clock=lambda: clock[0])
    metrics.watch_heard("pods")
    clock[0] = 179.0
    metrics.watch_heard("jobs")
    assert stale_watches(metrics) == {}
    clock[0] = 181.0
    assert stale_watches(metrics) == {"pods": 181.0}
