import asyncio
import json

import pytest
from aiohttp import ClientSession, web
from support.kube_fake import FakeKube
from support.raw_pods import condition, raw_pod
from support.simulated_time import run

from tba.contracts.history import Progress
from tba_operator.caches import Caches
from tba_operator.podstate import pod_of
from tba_operator.progress import (
    MAX_BYTES,
    ProgressPoller,
    Unreachable,
    direct,
    parse_progress,
    running_trainers,
    through_api,
)

KEY = ("default", "gsm8k")


def progress(pod_uid="uid-t", step=1, **more):
    fields = {
        "run_id": "r",
        "pod_uid": pod_uid,
        "state": "Training",
        "epoch": 1,
        "step": step,
        "total_steps": 700,
        "percentage": 0.1,
        "policy_version": 0,
        "reward": None,
        "eval_score": None,
        "staleness_mean": None,
        "trainer_idle_percent": None,
        "trajectories": 0,
        "replay_ratio": None,
        "eta_seconds": None,
        "searchers": 1,
        "last_updated_time": 0.0,
    }
    return Progress(**(fields | more))


def trainer(name="t", ip="10.0.0.7", ready=True, role="trainer", **more):
    status = {"podIP": ip} if ip else {}
    ready_now = [condition("Ready", "True" if ready else "False")]
    return pod_of(raw_pod(role, name, status=status, conditions=ready_now, **more))


class Scene:
    """A poller over trainers and answers that a test sets."""

    def __init__(self, **trainers):
        self.now = 0.0
        self.trainers = {("default", name): pod for name, pod in trainers.items()}
        self.answers = {}
        self.woken = []
        self.poller = ProgressPoller(
            lambda: self.trainers, self.fetch, self.woken.append, interval_seconds=10.0, clock=lambda: self.now
        )

    async def fetch(self, namespace, pod):
        answer = self.answers.get(pod.uid)
        if answer is None:
            raise Unreachable("no answer")
        return answer.to_json()

    async def poll(self):
        due = self.poller.due()
        await asyncio.gather(*(self.poller.read(key, pod) for key, pod in due))
        return [key[1] for key, _ in due]


def test_a_trainer_that_just_got_ready_is_read_at_once():
    scene = Scene()
    assert asyncio.run(scene.poll()) == []
    scene.trainers = {KEY: trainer()}
    assert asyncio.run(scene.poll()) == ["gsm8k"]


def test_then_it_is_read_once_an_interval():
    scene = Scene(gsm8k=trainer())
    asyncio.run(scene.poll())
    scene.now = 9.9
    assert asyncio.run(scene.poll()) == []
    scene.now = 10.0
    assert asyncio.run(scene.poll()) == ["gsm8k"]


def test_another_pod_is_read_at_once():
    scene = Scene(gsm8k=trainer())
    asyncio.run(scene.poll())
    scene.trainers = {KEY: trainer("next")}
    assert asyncio.run(scene.poll()) == ["gsm8k"]


def test_with_many_jobs_each_is_read_less_often():
    scene = Scene(**{f"j{i}": trainer(f"t{i}") for i in range(300)})
    asyncio.run(scene.poll())
    scene.now = 29.0
    assert asyncio.run(scene.poll()) == []
    scene.now = 30.0
    assert len(asyncio.run(scene.poll())) == 300


def test_changed_progress_wakes_its_job():
    scene = Scene(gsm8k=trainer())
    for step in (1, 2):
        scene.answers["uid-t"] = progress(step=step)
        asyncio.run(scene.poll())
        scene.now += 10
    assert scene.woken == [KEY, KEY]
    sample = scene.poller.sample(KEY, frozenset({"uid-t"}))
    assert sample is not None and (sample.progress.step, sample.received) == (2, 10.0)


def test_only_another_moment_is_no_change():
    scene = Scene(gsm8k=trainer())
    for moment in (1.0, 2.0):
        scene.answers["uid-t"] = progress(last_updated_time=moment)
        asyncio.run(scene.poll())
        scene.now += 10
    assert scene.woken == [KEY]
    sample = scene.poller.sample(KEY, frozenset({"uid-t"}))
    assert sample is not None and sample.received == 10.0


def test_an_answer_of_another_pod_is_not_believed():
    scene = Scene(gsm8k=trainer())
    scene.answers["uid-t"] = progress(pod_uid="stranger")
    asyncio.run(scene.poll())
    assert scene.woken == []


def test_silence_keeps_the_last_answer():
    scene = Scene(gsm8k=trainer())
    scene.answers["uid-t"] = progress()
    asyncio.run(scene.poll())
    scene.answers.clear()
    scene.now = 10.0
    asyncio.run(scene.poll())
    assert scene.poller.sample(KEY, frozenset({"uid-t"})) is not None


def test_the_answer_of_a_pod_that_is_gone_is_not_given_out():
    scene = Scene(gsm8k=trainer())
    scene.answers["uid-t"] = progress()
    asyncio.run(scene.poll())
    assert scene.poller.sample(KEY, frozenset({"uid-next"})) is None
    scene.trainers = {}
    asyncio.run(scene.poll())
    assert scene.poller.sample(KEY, frozenset({"uid-t"})) is None


def test_an_answer_that_comes_after_its_pod_was_replaced_is_dropped():
    scene = Scene(gsm8k=trainer())
    scene.answers["uid-t"] = progress()

    async def late():
        [(key, old)] = scene.poller.due()
        scene.trainers = {KEY: trainer("next")}
        scene.poller.due()
        await scene.poller.read(key, old)

    asyncio.run(late())
    assert scene.woken == []


def test_a_trainer_that_hangs_does_not_hold_up_the_others():
    scene = Scene(slow=trainer("slow"), quick=trainer("quick"))
    scene.answers["uid-quick"] = progress("uid-quick")
    answer = scene.fetch

    async def fetch(namespace, pod):
        if pod.name == "slow":
            await asyncio.sleep(3600)
        return await answer(namespace, pod)

    async def three_seconds():
        poller = ProgressPoller(lambda: scene.trainers, fetch, scene.woken.append, clock=lambda: 0.0)
        task = asyncio.create_task(poller.run())
        await asyncio.sleep(3)
        task.cancel()

    run(three_seconds())
    assert scene.woken == [("default", "quick")]


def test_a_trainer_that_is_not_ready_yet_is_asked_what_it_waits_for():
    starting = trainer("starting", ready=False)
    assert running_trainers(Caches({}, {}, {KEY: [starting]})) == {KEY: starting}


def test_a_copy_of_a_trainer_pod_does_not_speak_for_the_job():
    own = trainer("own", creationTimestamp="2027-01-15T07:00:00Z")
    copied = trainer("copied", ownerReferences=[])
    assert running_trainers(Caches({}, {}, {KEY: [own, copied]})) == {KEY: own}


def test_only_running_trainers_with_an_address_are_asked_and_the_newest_of_them():
    pods = [
        trainer("no-address", ip=None),
        trainer("over", phase="Failed"),
        trainer("searcher", role="searcher"),
        trainer("old", creationTimestamp="2027-01-15T07:00:00Z"),
        trainer("new"),
    ]
    assert running_trainers(Caches({}, {}, {KEY: pods})) == {KEY: pods[-1]}
    assert running_trainers(Caches({}, {}, {KEY: pods[:3]})) == {}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"<html>", "t: no progress: expected value at line 1 column 1$"),
        (b"7", "t: no progress: "),
        (b"[" * 5000, "t: no progress: recursion limit exceeded"),
        (b"{}", "t: no progress: runId: is required, got nothing"),
    ],
)
def test_what_is_no_progress_is_told(body, told):
    with pytest.raises(Unreachable, match=told):
        parse_progress(body, trainer())


def test_the_progress_of_a_trainer_of_a_newer_release_is_read_without_what_is_new_in_it():
    known = progress(alerts=[{"reason": "SyncStalled", "message": "m"}])
    newer = json.loads(known.to_json())
    newer["ofTheFuture"] = newer["alerts"][0]["ofTheFuture"] = {"a": [1]}
    assert parse_progress(json.dumps(newer).encode(), trainer()) == known


def test_through_the_api_server_the_pods_own_answer_is_read():
    api = FakeKube()
    api.pod_answers["default", "t"] = b"{}"
    assert asyncio.run(through_api(api)("default", trainer())) == b"{}"
    with pytest.raises(Unreachable):
        asyncio.run(through_api(api)("default", trainer("silent")))


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [(b"{}", 200, None), (b"x" * (MAX_BYTES + 1), 200, "more than"), (b"", 302, "HTTP 302"), (b"", 500, "HTTP 500")],
)
def test_a_direct_answer_is_bounded_and_comes_from_the_pod_itself(body, status, told):
    async def ask():
        async def answer(request):
            return web.Response(body=body, status=status, headers={"Location": "/elsewhere"})

        application = web.Application()
        application.add_routes([web.get("/progress", answer)])
        runner = web.AppRunner(application)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            async with ClientSession() as session:
                return await direct(session, port=port)("default", trainer(ip="127.0.0.1"))
        finally:
            await runner.cleanup()

    if told is None:
        assert asyncio.run(ask()) == body
        return
    with pytest.raises(Unreachable, match=told):
        asyncio.run(ask())


def test_a_pod_that_refuses_connections_is_unreachable():
    async def ask():
        async with ClientSession() as session:
            await direct(session, port=1)("default", trainer(ip="127.0.0.1"))

    with pytest.raises(Unreachable):
        asyncio.run(ask())
