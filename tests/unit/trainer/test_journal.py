"""The append-only logs: rows in order, none lost and none twice, whatever storage does in between."""

import json
import threading

import pytest
from support.memory_store import MemoryStore

from tba.contracts.errors import StoreUnavailable
from tba.contracts.history import ROW, EventRow
from tba.contracts.keys import LogKey
from tba.store import AccessDenied
from tba.trainer.journal import Flusher, Journal


class FailingStore(MemoryStore):
    """Refuses the puts numbered in `refused` (before writing) and loses the reply of those in `unanswered`."""

    def __init__(self, refused=(), unanswered=()) -> None:
        super().__init__()
        self.refused, self.unanswered, self.puts = set(refused), set(unanswered), 0

    def put_once(self, key, data) -> None:
        self.puts += 1
        if self.puts in self.refused:
            raise StoreUnavailable("no answer")
        super().put_once(key, data)
        if self.puts in self.unanswered:
            raise StoreUnavailable("reply lost")


def row(number: int) -> EventRow:
    return EventRow(epoch=3, step=number, time=0.0, event="test")


def steps(store: MemoryStore, kind: str = "metrics") -> list[int]:
    found = []
    for info in store.list_after(f"{kind}/"):
        assert LogKey.parse(info.key).epoch == 3
        found += [ROW.validate_python(json.loads(line)).step for line in store.get(info.key).data.splitlines()]
    return found


def test_nothing_is_written_before_it_is_sealed():
    store = MemoryStore()
    journal = Journal(store, "metrics", 3)
    journal.append(row(1))
    journal.flush()
    assert store.objects == {}


def test_rows_stand_in_the_order_in_which_they_were_appended():
    store = MemoryStore()
    journal = Journal(store, "ingest", 3)
    for number in range(10):
        journal.append(row(number))
        if number % 3 == 2:
            journal.seal()
    journal.seal()
    journal.flush()
    assert steps(store, "ingest") == list(range(10))
    assert sorted(store.objects) == [LogKey("ingest", 3, seq).path for seq in range(4)]
    assert all(stored.data.endswith(b"\n") for stored in store.objects.values())


def test_seal_counts_objects_and_an_empty_one_is_none():
    journal = Journal(MemoryStore(), "metrics", 3)
    assert journal.seal() == 0
    journal.append(row(1))
    journal.append(row(2))
    assert journal.seal() == 1
    assert journal.seal() == 1
    journal.append(row(3))
    assert journal.seal() == 2
    journal.flush()
    assert journal.seal() == 2


@pytest.mark.parametrize(("refused", "unanswered"), [({1}, ()), ({2, 3}, ()), ((), {1}), ({3}, {2}), ({1, 2, 3}, {4})])
def test_no_row_is_lost_doubled_or_moved_when_storage_fails_in_between(refused, unanswered):
    store = FailingStore(refused, unanswered)
    journal = Journal(store, "metrics", 3)
    failures = 0
    for number in range(6):
        journal.append(row(number))
        journal.seal()
        try:
            journal.flush()
        except StoreUnavailable:
            failures += 1
    journal.flush()
    assert failures == len(refused) + len(unanswered)
    assert steps(store) == list(range(6))
    assert len(store.objects) == 6


def test_a_failed_flush_writes_nothing_behind_the_gap():
    store = FailingStore(refused={1})
    journal = Journal(store, "metrics", 3)
    for number in range(3):
        journal.append(row(number))
        journal.seal()
    with pytest.raises(StoreUnavailable):
        journal.flush()
    assert store.objects == {}


def test_rows_appended_while_a_flush_runs_are_kept():
    class Slow(MemoryStore):
        def put_once(self, key, data) -> None:
            if not self.objects:
                journal.append(row(2))
                assert journal.seal() == 2
            super().put_once(key, data)

    store = Slow()
    journal = Journal(store, "metrics", 3)
    journal.append(row(1))
    journal.seal()
    journal.flush()
    assert steps(store) == [1, 2]


def test_two_threads_flushing_at_once_write_each_object_once():
    store = MemoryStore()
    journal = Journal(store, "metrics", 3)
    for number in range(50):
        journal.append(row(number))
        journal.seal()
    threads = [threading.Thread(target=journal.flush) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps(store) == list(range(50))
    assert store.count("put_once") == 50


def flushed(store, *, give_up_seconds: float = 600.0) -> tuple[Journal, Flusher]:
    journal = Journal(store, "metrics", 3)
    journal.append(row(1))
    return journal, Flusher([journal], give_up_seconds=give_up_seconds, interval_seconds=0.0005)


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), AccessDenied("credentials rotate")])
def test_the_flushing_thread_outlives_storage_that_refuses_and_writes_all_rows_then(error):
    class Down(MemoryStore):
        tries = 0

        def put_once(self, key, data) -> None:
            self.tries += 1
            if self.tries < 4:
                raise error
            super().put_once(key, data)
            written.set()

    store, written = Down(), threading.Event()
    _, flusher = flushed(store)
    flusher.start()
    assert written.wait(10)
    flusher.close()
    flusher.check()
    assert steps(store) == [1] and flusher.outage.since is None


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), AccessDenied("no rights any more")])
def test_the_flushing_thread_never_dies_without_a_word(error):
    class Broken(MemoryStore):
        def put_once(self, key, data) -> None:
            raise error

    _, flusher = flushed(Broken(), give_up_seconds=0.0)
    flusher.start()
    flusher._thread.join(10)
    with pytest.raises(type(error)):
        flusher.check()
