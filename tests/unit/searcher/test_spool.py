import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.memory_store import MemoryStore

from tba.contracts.errors import StoreUnavailable
from tba.contracts.keys import ShardKey
from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.searcher.spool import Spool, SpoolLimits, shard_seconds
from tba.shards import decode_shard

RUN = "a" * 32


class FailingStore(MemoryStore):
    down = False
    lose_next = False

    def put_once(self, key, data):
        if self.down:
            raise StoreUnavailable("storage: connection refused: start it")
        super().put_once(key, data)
        if self.lose_next:
            self.lose_next = False
            raise StoreUnavailable("storage: reply lost: retry")


def rows(visit: int, size: int = 2, tokens: int = 3) -> list[Trajectory]:
    row = Trajectory(
        prompt_id=1, visit=visit, visit_size=size, prompt_tokens=[1, 2], response_tokens=[4] * tokens,
        outcome=Outcome.SCORED, reward=1.0, finish_reason=FinishReason.STOP, spans=[Span(tokens, 1, 0)],
        temperature=1.0, created_at=1.0,
    )  # fmt: skip
    return [row] * size


class Rig:
    def __init__(self, folder: Path, store: MemoryStore, incarnation: str = "b" * 32, **limits) -> None:
        self.now, self.window = 0.0, 5
        self.limits = SpoolLimits(**limits)
        self.spool = Spool(
            store,
            folder,
            header=lambda seq: ShardHeader(
                run=RUN, searcher="s-0", incarnation=incarnation, seq=seq, reward_version="r"
            ),
            window=lambda: self.window,
            limits=lambda: self.limits,
            clock=lambda: self.now,
        )


def shards(store: MemoryStore) -> list[tuple[ShardKey, int]]:
    return [(ShardKey.parse(k), len(decode_shard(o.data, run_id=RUN))) for k, o in sorted(store.objects.items())]


@pytest.fixture
def store() -> FailingStore:
    return FailingStore()


def test_a_shard_is_cut_by_age_and_not_before(tmp_path, store):
    rig = Rig(tmp_path, store, shard_seconds=2.0)
    rig.spool.add(rows(0))
    rig.now = 1.9
    rig.spool.tick()
    assert rig.spool.pending_shards == 0
    rig.now = 2.0
    rig.spool.tick()
    assert rig.spool.pending_shards == 1
    assert rig.spool.upload_once() and not rig.spool.upload_once()
    assert shards(store) == [(ShardKey(5, "s-0", "b" * 32, 0), 2)]
    for rig.now in (3.0, 4.9):  # the age is that of the oldest row, whenever the shard before was cut
        rig.spool.add(rows(1))
        assert rig.spool.pending_shards == 0
    rig.now = 5.0
    rig.spool.tick()
    assert rig.spool.pending_shards == 1
    rig.spool.close()


def test_a_shard_is_cut_by_bytes_with_whole_visits(tmp_path, store):
    rig = Rig(tmp_path, store, shard_bytes=1000)
    for visit in range(4):
        rig.spool.add(rows(visit, tokens=50))
    while rig.spool.upload_once():
        pass
    assert [(k.seq, n) for k, n in shards(store)] == [(0, 4), (1, 4)]
    rig.spool.close()


def test_the_window_is_that_of_the_first_attempt_and_stays(tmp_path, store):
    rig = Rig(tmp_path, store)
    rig.spool.add(rows(0))
    rig.spool.flush()
    rig.window, store.down = 9, True
    with pytest.raises(StoreUnavailable):
        rig.spool.upload_once()
    rig.window, store.down = 12, False
    rig.spool.upload_once()
    assert [k.window for k, _ in shards(store)] == [9]
    rig.spool.close()


def test_a_lost_reply_leaves_one_shard(tmp_path, store):
    rig = Rig(tmp_path, store)
    rig.spool.add(rows(0))
    rig.spool.flush()
    store.lose_next = True
    with pytest.raises(StoreUnavailable):
        rig.spool.upload_once()
    assert rig.spool.pending_shards == 1
    assert rig.spool.upload_once()
    assert len(shards(store)) == 1 and rig.spool.pending_shards == 0
    rig.spool.close()


def test_nothing_is_uploaded_before_latest_was_seen(tmp_path, store):
    rig = Rig(tmp_path, store)
    rig.window = 0
    rig.spool.add(rows(0))
    rig.spool.flush()
    assert not rig.spool.upload_once() and rig.spool.pending_shards == 1
    rig.spool.close()


def test_storage_down_fills_the_spool_to_its_cap_and_drops_nothing(tmp_path, store):
    rig = Rig(tmp_path, store, shard_bytes=1, cap_bytes=6000)
    visits = 0
    while not rig.spool.full:
        rig.spool.add(rows(visits))
        visits += 1
    assert 1 < visits < 20
    while rig.spool.upload_once():
        pass
    assert not rig.spool.full
    assert [k.seq for k, _ in shards(store)] == list(range(visits))
    rig.spool.close()


def test_a_successor_uploads_what_a_dead_process_left_under_its_old_keys(tmp_path, store):
    dead = Rig(tmp_path, store)
    for visit in range(2):
        dead.spool.add(rows(visit))
        dead.spool.flush()
    store.down = True
    with pytest.raises(StoreUnavailable):
        dead.spool.upload_once()  # the first has a key now, the second has none
    dead.spool.close()  # as the kernel does: the lock goes, the files stay
    store.down = False
    heir = Rig(tmp_path, store, "c" * 32)
    heir.window = 8
    assert heir.spool.counts.adopted == 2
    while heir.spool.upload_once():
        pass
    assert [(k.window, k.incarnation[0], k.seq) for k, _ in shards(store)] == [(5, "b", 0), (8, "b", 1)]
    heir.spool.close()
    assert list(tmp_path.iterdir()) == []


def test_the_spool_of_a_living_process_is_left_alone(tmp_path, store):
    living = Rig(tmp_path, store)
    living.spool.add(rows(0))
    living.spool.flush()
    other = Rig(tmp_path, store, "c" * 32)
    assert other.spool.counts.adopted == 0
    living.spool.close()
    other.spool.close()


def test_a_folder_that_another_process_is_just_making_is_left_alone(tmp_path, store):
    made = tmp_path / f".{'b' * 32}"  # it has no lock yet
    made.mkdir()
    Rig(tmp_path, store, "c" * 32).spool.close()
    assert made.is_dir()


def test_a_cut_off_file_is_set_aside(tmp_path, store):
    dead = Rig(tmp_path, store)
    dead.spool.add(rows(0))
    dead.spool.flush()
    dead.spool.close()
    (file,) = tmp_path.glob("*/*.arrow")
    file.write_bytes(file.read_bytes()[:-10])
    heir = Rig(tmp_path, store, "c" * 32)
    assert heir.spool.counts.adopted == 0 and list(tmp_path.glob("*/*.refused"))
    heir.spool.close()


@pytest.mark.parametrize("left", [0, 1])
def test_a_process_that_died_amid_a_write_leaves_nothing_once_it_was_adopted(tmp_path, store, left):
    dead = Rig(tmp_path, store)
    for visit in range(left):
        dead.spool.add(rows(visit))
        dead.spool.flush()
    (tmp_path / ("b" * 32) / "unkeyed.s-0.part").write_bytes(b"half of a shard")
    os.close(dead.spool._lock_file)  # its death
    successor = Rig(tmp_path, store, incarnation="c" * 32)
    while successor.spool.upload_once():
        pass
    successor.spool.close()
    assert list(tmp_path.iterdir()) == [] and len(shards(store)) == left


def test_another_object_under_the_key_is_kept_aside_and_counted(tmp_path, store):
    rig = Rig(tmp_path, store)
    rig.spool.add(rows(0))
    rig.spool.flush()
    store.put_once(ShardKey(5, "s-0", "b" * 32, 0).path, b"something else")
    rig.spool.upload_once()
    assert rig.spool.counts.refused == 1 and rig.spool.pending_shards == 0
    rig.spool.close()


def test_the_thread_uploads_and_drain_waits_for_it(tmp_path, store):
    rig = Rig(tmp_path, store)
    rig.spool.start()
    rig.spool.add(rows(0))
    rig.spool.flush()
    assert rig.spool.drain(10.0)
    rig.spool.close()
    assert rig.spool._thread is not None and not rig.spool._thread.is_alive(), "the folder is another's from now on"
    assert len(shards(store)) == 1


def test_uploads_that_a_bug_has_ended_are_not_waited_for_and_are_not_taken_for_done(tmp_path, store):
    rig = Rig(tmp_path, store)
    store.put_once = lambda key, data: 1 / 0
    rig.spool.start()
    rig.spool.add(rows(0))
    rig.spool.flush()
    assert not rig.spool.drain(3600.0)
    with pytest.raises(ZeroDivisionError):
        rig.spool.check()
    rig.spool.close()
    assert len(list(tmp_path.glob("*/*.arrow"))) == 1


def test_shards_of_a_fast_job_are_a_fraction_of_a_second():
    assert shard_seconds(0.1) == pytest.approx(0.2)
    assert shard_seconds(60.0) == 5.0
    assert replace(SpoolLimits(), shard_seconds=1.0).cap_bytes == 2**30
