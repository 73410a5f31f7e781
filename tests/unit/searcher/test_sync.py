from dataclasses import dataclass

import pytest
from support.memory_store import MemoryStore
from support.synthetic_run import run_record

from tba.contracts.errors import CorruptObject, StoreUnavailable
from tba.contracts.keys import LATEST, RUN, WeightsKey
from tba.contracts.records import Latest
from tba.searcher.sync import Poller, RunReplaced
from tba.store import AccessDenied, NotFound


def key(version: int, epoch: int = 1) -> str:
    return WeightsKey(version, epoch, f"{version:032x}").path


@dataclass
class Weights:
    key: str


class Rig:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.now = 0.0
        self.fetched: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.older: dict[str, str] = {}
        self.commit = 0
        self.store.put_once(RUN, run_record().to_json())
        self.poller = Poller(
            self.store, run_id=run_record().run_id, interval_seconds=lambda: 2.0, fetch=self.fetch,
            clock=lambda: self.now,
        )  # fmt: skip

    def fetch(self, store, manifest: str):
        self.fetched.append(manifest)
        if manifest in self.older:
            return Weights(self.older[manifest])
        if manifest in self.broken:
            raise self.broken[manifest]
        return Weights(manifest)

    def publish(self, manifest: str | None, evaluation: str | None = None, version: int = 0) -> None:
        self.commit += 1
        body = Latest(
            commit=self.commit, epoch=1, version=version, step=version, manifest=manifest, evaluation=evaluation,
            nonce=f"{self.commit:032x}",
        )  # fmt: skip
        etag = self.store.get(LATEST).etag if LATEST in self.store.objects else None
        self.store.cas(LATEST, body.to_json(), etag)

    def poll(self, after: float = 0.0) -> None:
        self.now += after
        self.poller.poll_once()


def test_weights_are_staged_once_and_only_when_latest_names_others():
    rig = Rig()
    rig.poll()
    assert rig.poller.latest is None and rig.poller.window == 0
    rig.publish(key(0))
    rig.poll()
    assert rig.poller.window == 1
    taken = rig.poller.take()
    assert taken is not None and taken.key == key(0)
    assert rig.poller.take() is None
    rig.publish(key(0))  # a new window, the same weights
    rig.poll()
    assert rig.fetched == [key(0)] and rig.poller.window == 2


def test_a_rollback_to_an_older_version_is_followed():
    rig = Rig()
    rig.publish(key(120), version=120)
    rig.poll()
    rig.poller.take()
    rig.publish(key(100, epoch=2), version=100)
    rig.poll()
    taken = rig.poller.take()
    assert taken is not None and taken.key == key(100, epoch=2)


def test_newer_weights_replace_staged_ones_that_nobody_took():
    rig = Rig()
    for version in (1, 2):
        rig.publish(key(version))
        rig.poll()
    taken = rig.poller.take()
    assert taken is not None and taken.key == key(2)


@pytest.mark.parametrize(
    "error", [CorruptObject("flipped bit"), NotFound("gone"), AccessDenied("gone, no right to list")]
)
def test_a_bad_snapshot_is_tried_again_with_growing_waits(error):
    rig = Rig()
    rig.publish(key(1))
    rig.broken[key(1)] = error
    times = []
    for _ in range(40):
        before = len(rig.fetched)
        rig.poll(after=1.0)
        if len(rig.fetched) > before:
            times.append(rig.now)
    assert [b - a for a, b in zip(times, times[1:], strict=False)] == [4, 8, 16]
    assert rig.poller.take() is None and "refused" in rig.poller.detail
    rig.broken.clear()
    rig.poll(after=60.0)
    assert rig.poller.take() is not None


def test_older_weights_in_place_of_the_wanted_ones_serve_until_those_can_be_read():
    rig = Rig()
    rig.publish(key(3), version=3)
    rig.older = {key(3): key(1)}
    rig.poll()
    taken = rig.poller.take()
    assert taken is not None and taken.key == key(1) and "refused" in rig.poller.detail
    rig.poll(after=1.0)
    assert rig.fetched == [key(3)], "not before the wait is over"
    rig.older.clear()
    rig.poll(after=3.0)
    taken = rig.poller.take()
    assert taken is not None and taken.key == key(3)


def test_an_evaluation_is_never_begun_with_other_weights_than_its_own():
    rig = Rig()
    rig.publish(key(4), evaluation=key(3), version=4)
    rig.older = {key(3): key(1)}
    rig.poll()
    rig.poller.take()
    assert rig.poller.evaluation() is None


def test_unavailable_storage_is_survived_and_said():
    rig = Rig()
    rig.publish(key(1))
    rig.broken[key(1)] = StoreUnavailable("storage: refused: start it")
    rig.poll()
    assert "unavailable" in rig.poller.detail
    rig.broken.clear()
    rig.poll()
    assert rig.poller.take() is not None


def test_an_evaluation_of_the_newest_weights_needs_one_fetch():
    rig = Rig()
    rig.publish(key(2), evaluation=key(2))
    rig.poll()
    wanted = rig.poller.evaluation()
    assert wanted is not None and wanted[1] is not None
    rig.poller.evaluation_started(key(2))
    rig.poll()
    assert rig.fetched == [key(2)] and rig.poller.take() is None


def test_an_evaluation_of_older_weights_is_fetched_beside_the_newest_and_then_left():
    rig = Rig()
    rig.publish(key(2), evaluation=key(2))
    rig.poll()
    rig.poller.take()
    assert rig.poller.evaluation() == (key(2), None)  # held already
    rig.publish(key(4), evaluation=key(2))
    rig.poll()
    rig.poller.take()
    assert rig.poller.evaluation() is None  # 4 is held, 2 must come again
    rig.poll()
    wanted = rig.poller.evaluation()
    assert wanted is not None and wanted[1] is not None and wanted[1].key == key(2)
    rig.poll()
    assert rig.fetched == [key(2), key(4), key(2)], "it is kept until it begins"
    rig.poller.evaluation_started(key(2))
    rig.poller.evaluation_finished(key(2))
    assert rig.poller.evaluation() is None
    rig.poll()
    taken = rig.poller.take()
    assert taken is not None and taken.key == key(4)


def test_a_finished_evaluation_is_not_begun_again():
    rig = Rig()
    rig.publish(key(2), evaluation=key(2))
    rig.poll()
    rig.poller.evaluation_finished(key(2))
    rig.poll()
    assert rig.poller.evaluation() is None


@pytest.mark.parametrize("commits", [0, 1, 9])
def test_another_run_in_the_place_of_ours_ends_the_searcher_whatever_its_commit_is(commits):
    rig = Rig()
    rig.publish(key(1))
    rig.publish(key(2))
    rig.poll()
    rig.store.delete([LATEST])
    rig.poll()  # a deletion has begun: run.json goes last
    assert rig.poller.window == 2
    rig.store.delete([RUN])
    if commits:
        rig.store.put_once(RUN, run_record().model_copy(update={"run_id": "f" * 32}).to_json())
        rig.commit = commits - 1
        rig.publish(key(0))
    with pytest.raises(RunReplaced, match="start the searcher again") as caught:
        rig.poll()
    assert caught.value.exit_code == 2


def test_an_unreadable_latest_changes_nothing():
    rig = Rig()
    rig.publish(key(1))
    rig.poll()
    rig.store.cas(LATEST, b"{}", rig.store.get(LATEST).etag)
    rig.poll()
    assert rig.poller.window == 1


def test_a_bug_ends_the_thread_and_is_raised_by_check():
    rig = Rig()
    rig.publish(key(1))
    rig.broken[key(1)] = ZeroDivisionError()
    rig.poller.start()
    assert rig.poller._thread is not None
    rig.poller._thread.join(10.0)
    with pytest.raises(ZeroDivisionError):
        rig.poller.check()


def test_weights_that_the_engine_refuses_are_fetched_again_later():
    rig = Rig()
    rig.publish(key(1), version=1)
    rig.poll()
    first = rig.poller.take()
    assert first is not None
    rig.publish(key(2), version=2)
    rig.poll()
    assert rig.poller.take() is not None
    rig.poller.refused(key(2), CorruptObject("the engine could not load it"), held=first.key)
    rig.poll(1.0)
    assert not rig.poller.has_staged
    rig.poll(60.0)
    assert rig.fetched == [key(1), key(2), key(2)]
    again = rig.poller.take()
    assert again is not None and again.key == key(2)
