"""The reading thread: every shard is offered once, bad ones with a reason, and none is counted before its time."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.learning import INCARNATION, RUN
from support.memory_store import MemoryStore

from tba.contracts.errors import StoreUnavailable
from tba.contracts.keys import ShardKey
from tba.contracts.records import FinishReason, Outcome, ShardHeader, ShardId, Span, Trajectory
from tba.protocol.windows import LINGER_SECONDS
from tba.shards import encode_shard
from tba.store import AccessDenied
from tba.trainer.ingest import Arrival, Binding, Ingestor, read_shard

BINDING = Binding(run_id=RUN, num_prompts=4, vocabulary=40)
HANG = 10.0  # seconds after which a test that waits for the thread has failed


def shard(seq: int, *, run: str = RUN, searcher: str = "searcher-0", prompt: int = 0, token: int = 5) -> bytes:
    rows = [
        Trajectory(
            prompt_id=prompt,
            visit=seq,
            visit_size=2,
            prompt_tokens=[1, 2],
            response_tokens=[token, 3 + i],
            outcome=Outcome.SCORED,
            reward=float(i),
            finish_reason=FinishReason.STOP,
            spans=[Span(2, 1, 0)],
            temperature=1.0,
            created_at=0.0,
        )
        for i in range(2)
    ]
    header = ShardHeader(run=run, searcher=searcher, incarnation=INCARNATION, seq=seq, reward_version="v")
    return encode_shard(header, rows)


def key(seq: int, window: int = 1, searcher: str = "searcher-0") -> str:
    return ShardKey(window, searcher, INCARNATION, seq).path


class Loop:
    """What the training loop is to the ingestor: a commit number, what is ingested, and a clock."""

    def __init__(
        self,
        store,
        *,
        lowest_unswept_window: int = 0,
        ingested: set[ShardId] | None = None,
        foreign=(),
        searcher_poll_seconds: float = 2.0,
        poll_seconds: float = 0.0005,
    ) -> None:
        self.commit = 1
        self.ingested = ingested or set()
        self.now = 100.0
        self._polls = 0
        self._polled = threading.Condition()
        self.ingestor = Ingestor(
            store,
            BINDING,
            lowest_unswept_window=lowest_unswept_window,
            commit=self._poll_begins,
            is_ingested=lambda shard_id: shard_id in self.ingested,
            starved=lambda: False,
            poll_seconds=lambda: poll_seconds,
            searcher_poll_seconds=lambda: searcher_poll_seconds,
            give_up_seconds=600.0,
            foreign=foreign,
            clock=lambda: self.now,
        )

    def _poll_begins(self) -> int:
        with self._polled:
            self._polls += 1
            self._polled.notify_all()
        return self.commit

    def whole_poll(self) -> None:
        """Return once a poll that began after this call has ended."""
        with self._polled:
            wanted = self._polls + 2  # the next one, and the beginning of the one behind it
            assert self._polled.wait_for(lambda: self._polls >= wanted, HANG), "the thread does not poll"

    def take(self, count: int) -> list[Arrival]:
        arrivals: list[Arrival] = []
        while len(arrivals) < count:
            got = self.ingestor.take(HANG)
            assert got, f"waited {HANG} s for {count} arrivals, got {len(arrivals)}"
            arrivals += got
        return arrivals

    def accept(self, arrivals: list[Arrival]) -> None:
        self.ingested |= {a.shard_id for a in arrivals if a.shard_id is not None}
        self.ingestor.ingested(arrivals)


@contextmanager
def reading(store, **options):
    loop = Loop(store, **options)
    loop.ingestor.start()
    try:
        yield loop
    finally:
        loop.ingestor.close()


BAD = {
    "truncated": (shard(7)[:-20], "shard"),
    "empty": (b"", "shard"),
    "flipped": (shard(7).replace(b"searcher-0", b"searcher-1"), "hash"),
    "foreign run": (shard(7, run="e" * 32), "foreign"),
    "beyond the vocabulary": (shard(7, token=40), "vocabulary of 40"),
    "beyond the prompts": (shard(7, prompt=4), "beyond the 4 prompts"),
    "another's seq": (shard(8), "header says"),
    "another's searcher": (shard(7, searcher="searcher-9"), "header says searcher-9"),
}


@pytest.mark.parametrize(
    ("binding", "reason"),
    [
        (replace(BINDING, max_model_len=3), "4 tokens, beyond maxModelLen 3"),
        (replace(BINDING, prompts=SimpleNamespace(prompt_tokens=lambda _: np.array([1, 3]))), "prompt set"),
    ],
)
def test_sound_shard_that_does_not_fit_the_run_is_refused(binding, reason):
    store = MemoryStore()
    store.put_once(key(7), shard(7))
    arrival = read_shard(store, key(7), binding)
    assert arrival.batch is None and reason in arrival.reason
    fitting = replace(BINDING, max_model_len=4, prompts=SimpleNamespace(prompt_tokens=lambda _: np.array([1, 2])))
    assert read_shard(store, key(7), fitting).batch is not None


@pytest.mark.parametrize("name", BAD)
def test_bad_shard_is_an_arrival_with_a_reason_and_without_rows(name):
    data, reason = BAD[name]
    store = MemoryStore()
    store.put_once(key(7, window=3), data)
    arrival = read_shard(store, key(7, window=3), BINDING)
    assert arrival.batch is None
    assert reason in arrival.reason
    assert (arrival.key, arrival.shard_id, arrival.window) == (key(7, window=3), ShardId(INCARNATION, 7), 3)


def test_good_shard_at_the_edge_of_what_it_may_refer_to_is_read():
    store = MemoryStore()
    store.put_once(key(7), shard(7, token=39, prompt=3))
    arrival = read_shard(store, key(7), BINDING)
    assert arrival.reason == "" and arrival.batch is not None
    assert arrival.batch.header.id == arrival.shard_id == ShardId(INCARNATION, 7)
    assert len(arrival.batch) == 2


def test_window_of_a_bad_shard_stays_pending_until_it_is_ingested():
    store = MemoryStore()
    store.put_once(key(7, window=2), b"garbage")
    with reading(store, lowest_unswept_window=5) as loop:
        (arrival,) = loop.take(1)
        assert arrival.batch is None and arrival.reason
        loop.whole_poll()
        assert loop.ingestor.durable_window() == 2
        loop.accept([arrival])
        assert loop.ingestor.durable_window() == 5


def test_durable_window_never_passes_a_shard_that_was_listed_but_not_ingested():
    store = MemoryStore()
    for seq, window in enumerate((1, 1, 3)):
        store.put_once(key(seq, window), shard(seq))
    with reading(store) as loop:
        arrivals = loop.take(3)
        loop.commit = 9
        loop.whole_poll()
        loop.now += LINGER_SECONDS  # window 7 and all before are closed: swept by the next listing
        loop.whole_poll()
        loop.whole_poll()
        assert loop.ingestor.durable_window() == 1
        loop.accept(arrivals[:1])
        assert loop.ingestor.durable_window() == 1
        loop.accept(arrivals[1:2])
        assert loop.ingestor.durable_window() == 3
        loop.accept(arrivals[2:])
        assert loop.ingestor.durable_window() == 8


def test_a_window_stays_in_the_tail_as_long_as_a_searcher_that_polls_rarely_may_take_it_for_the_newest():
    interval = 60.0
    with reading(MemoryStore(), searcher_poll_seconds=interval) as loop:
        loop.commit = 9
        loop.whole_poll()
        loop.now += 1.5 * interval  # until then a searcher may not have seen it
        for _ in range(3):
            loop.whole_poll()
        assert loop.ingestor.durable_window() == 0
        loop.now += interval
        for _ in range(3):
            loop.whole_poll()
        assert loop.ingestor.durable_window() == 8


def test_position_does_not_move_past_a_shard_that_could_not_be_read():
    class Unreadable(MemoryStore):
        broken = True

        def get(self, key):
            if self.broken and key.endswith(f"{1:010d}.arrow"):
                raise StoreUnavailable("no answer")
            return super().get(key)

    store = Unreadable()
    for seq in range(3):
        store.put_once(key(seq, window=1), shard(seq))
    with reading(store) as loop:
        loop.accept(loop.take(1))
        loop.commit = 9
        loop.whole_poll()
        loop.now += LINGER_SECONDS
        for _ in range(3):
            loop.whole_poll()
        assert loop.ingestor.durable_window() == 0
        store.broken = False
        loop.accept(loop.take(2))
        loop.whole_poll()
        loop.now += LINGER_SECONDS
        loop.whole_poll()
        loop.whole_poll()
        assert loop.ingestor.durable_window() == 8
        assert loop.ingested == {ShardId(INCARNATION, seq) for seq in range(3)}


def test_each_shard_is_offered_once_however_often_it_is_listed():
    store = MemoryStore()
    store.put_once(key(0), shard(0))
    store.put_once("shards/0000000001/notes.txt", b"hello")
    with reading(store) as loop:
        arrivals = loop.take(2)
        loop.whole_poll()
        loop.accept(arrivals)
        loop.whole_poll()
        assert loop.ingestor.take(0.0) == []
        assert store.calls.count(("get", key(0))) == 1
        store.put_once(key(1), shard(1))
        assert [a.key for a in loop.take(1)] == [key(1)]


def test_what_is_not_a_shard_is_reported_once_and_never_read():
    store = MemoryStore()
    store.put_once("shards/0000000002/notes.txt", b"hello")
    with reading(store, lowest_unswept_window=5) as loop:
        (arrival,) = loop.take(1)
        assert (arrival.key, arrival.shard_id, arrival.batch) == ("shards/0000000002/notes.txt", None, None)
        assert arrival.reason == "not a shard key"
        loop.whole_poll()
        assert loop.ingestor.take(0.0) == []
        assert loop.ingestor.durable_window() == 5, "it has no window to wait for"
        loop.ingestor.ingested([arrival])
        assert store.count("get") == 0


def test_what_is_ingested_already_is_not_read_again():
    store = MemoryStore()
    for seq in range(3):
        store.put_once(key(seq), shard(seq))
    with reading(store, ingested={ShardId(INCARNATION, 0), ShardId(INCARNATION, 2)}) as loop:
        assert [a.key for a in loop.take(1)] == [key(1)]
        loop.whole_poll()
        assert [k for call, k in store.calls if call == "get"] == [key(1)]


def test_shard_that_was_swept_between_list_and_get_is_passed_over():
    class Swept(MemoryStore):
        def get(self, key):
            if key.endswith(f"{0:010d}.arrow"):
                self.objects.pop(key, None)
            return super().get(key)

    store = Swept()
    for seq in range(2):
        store.put_once(key(seq), shard(seq))
    with reading(store) as loop:
        assert [a.key for a in loop.take(1)] == [key(1)]


def test_shards_are_offered_in_key_order_though_several_are_read_at_once():
    both, second = threading.Barrier(2, timeout=HANG), threading.Event()

    class Slow(MemoryStore):
        """The first shard's bytes come after the second's."""

        def get(self, key):
            if key.endswith(f"{0:010d}.arrow"):
                both.wait()
                assert second.wait(HANG)
            elif key.endswith(f"{1:010d}.arrow"):
                both.wait()
            stored = super().get(key)
            if key.endswith(f"{1:010d}.arrow"):
                second.set()
            return stored

    store = Slow()
    for seq in range(40):
        store.put_once(key(seq), shard(seq))
    with reading(store) as loop:
        assert [a.key for a in loop.take(40)] == [key(seq) for seq in range(40)]


def test_shards_before_one_that_cannot_be_read_are_offered_at_once():
    class Unreadable(MemoryStore):
        def get(self, key):
            if key.endswith(f"{2:010d}.arrow"):
                raise StoreUnavailable("no answer")
            return super().get(key)

    store = Unreadable()
    for seq in range(5):
        store.put_once(key(seq), shard(seq))
    with reading(store) as loop:
        assert [a.key for a in loop.take(2)] == [key(0), key(1)]
        loop.whole_poll()
        assert loop.ingestor.take(0.0) == []


@pytest.mark.parametrize("method", ["list_after", "get"])
@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), AccessDenied("credentials rotate")])
def test_storage_that_does_not_answer_is_visible_and_passes(method, error):
    down = threading.Event()

    class Down(MemoryStore):
        def list_after(self, prefix, after=None):
            self.answer("list_after")
            return super().list_after(prefix, after)

        def get(self, key):
            self.answer("get")
            return super().get(key)

        def answer(self, call):
            if call == method and down.is_set():
                raise error

    store = Down()
    with reading(store) as loop:
        loop.whole_poll()
        assert loop.ingestor.outage.since is None
        loop.now = 250.0
        down.set()
        store.put_once(key(0), shard(0))
        loop.whole_poll()
        loop.whole_poll()
        loop.now = 300.0
        loop.whole_poll()
        assert loop.ingestor.outage.since == 250.0
        assert loop.ingestor.take(0.0) == []
        down.clear()
        assert [a.key for a in loop.take(1)] == [key(0)]
        loop.whole_poll()
        assert loop.ingestor.outage.since is None


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), AccessDenied("no rights")])
def test_storage_that_never_answers_again_ends_the_run_with_its_error(error):
    class Down(MemoryStore):
        def list_after(self, prefix, after=None):
            loop.now += 301.0
            raise error

    loop = Loop(Down())
    loop.ingestor.start()
    loop.ingestor._thread.join(HANG)
    assert loop.now == 100.0 + 3 * 301.0, "600 s since the first failure, and then no more"
    with pytest.raises(type(error)):
        loop.ingestor.check()


def test_what_is_not_a_shard_and_was_reported_before_a_resume_is_not_reported_again():
    store = MemoryStore()
    for name in ("notes.txt", "more.txt"):
        store.put_once(f"shards/0000000001/{name}", b"hello")
    with reading(store, foreign=["shards/0000000001/notes.txt"]) as loop:
        assert [a.key for a in loop.take(1)] == ["shards/0000000001/more.txt"]
        loop.whole_poll()
        assert loop.ingestor.take(0.0) == []


def test_error_that_is_no_outage_reaches_the_loop():
    class Broken(MemoryStore):
        def list_after(self, prefix, after=None):
            raise ZeroDivisionError("a bug")

    loop = Loop(Broken())
    loop.ingestor.start()
    loop.ingestor.close()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        loop.ingestor.take(0.0)


def test_a_pause_ends_at_once_for_a_loop_that_wants_data():
    store = MemoryStore()
    with reading(store, poll_seconds=3600.0) as loop:
        for seq in range(2):
            store.put_once(key(seq), shard(seq))
            loop.ingestor.poll_now()
            loop.accept(loop.take(1))
    assert loop._polls <= 3, "one pause each time, and the next one lasts again"


def test_take_without_arrivals_waits_no_longer_than_it_may():
    with reading(MemoryStore()) as loop:
        assert loop.ingestor.take(0.0) == []
        assert loop.ingestor.take(0.002) == []
