"""Reads new shards in the background: list windows, fetch, verify, decode, queue for the training loop.

Nothing is marked by deleting or renaming. What counts as ingested is decided by the loop's bookkeeping, inside the
checkpoint; this thread only remembers what it has queued and the loop has not taken in yet.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tba import trace
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import ShardKey
from tba.contracts.records import ShardId
from tba.prompts import PromptSet
from tba.protocol.windows import Windows, carry_out, linger_for
from tba.shards import ShardBatch, decode_shard
from tba.store import NotFound, ObjectStore
from tba.trainer.outage import PASSING, Outage
from tba.trainer.readahead import map_ahead

QUEUE_SHARDS = 256
"""Shards decoded ahead of the loop; beyond it the reader pauses."""
READ_THREADS = 8
"""Shards fetched at once: a distant store takes tens of milliseconds for each."""
READ_AHEAD = 32
"""Shards in flight or waiting for an earlier one."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A shard that was read, or why it was refused."""

    key: str
    shard_id: ShardId | None
    """None: the key is not a shard's."""
    batch: ShardBatch | None
    reason: str = ""
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """What a shard of this run may refer to; anything beyond it is quarantined."""

    run_id: str
    num_prompts: int
    vocabulary: int
    max_model_len: int | None = None
    """Prompt plus response tokens; null: not checked."""
    prompts: PromptSet | None = None
    """Whose tokens each prompt must have; null: not checked."""

    def misfit(self, batch: ShardBatch) -> str | None:
        """Why a sound shard may not be trained on here. The buffer believes a shard's tokens, and would for good."""
        lengths = np.diff(batch.prompt_offsets) + np.diff(batch.response_offsets)
        longest = int(lengths.max(initial=0))
        if self.max_model_len is not None and longest > self.max_model_len:
            return f"a row has {longest} tokens, beyond maxModelLen {self.max_model_len}"
        if self.prompts is not None and len(batch):
            expected = np.concatenate([self.prompts.prompt_tokens(int(i)) for i in batch.prompt_ids])
            if not np.array_equal(batch.prompt_tokens, expected):
                return "prompt tokens are not those of the run's prompt set"
        return None


def read_shard(store: ObjectStore, path: str, binding: Binding) -> Arrival:
    """Fetch and verify one shard; a bad one becomes an arrival with a reason, never an exception.

    Raises: NotFound, StoreUnavailable, AccessDenied. ValueError if `path` is no shard key.
    """
    key = ShardKey.parse(path)
    shard_id = ShardId(key.incarnation, key.seq)
    try:
        batch = decode_shard(
            store.get(path).data,
            run_id=binding.run_id,
            num_prompts=binding.num_prompts,
            vocabulary=binding.vocabulary,
        )
    except CorruptObject as error:
        return Arrival(path, shard_id, None, str(error), key.window)
    misfit = binding.misfit(batch)
    if misfit is not None:
        return Arrival(path, shard_id, None, misfit, key.window)
    if batch.header.id != shard_id or batch.header.searcher != key.searcher:
        reason = f"header says {batch.header.searcher} {batch.header.id}, key says {key.searcher} {shard_id}"
        return Arrival(path, shard_id, None, reason, key.window)
    return Arrival(path, shard_id, batch, "", key.window)


class Ingestor:
    """The reading thread. It owns the position of listing; the loop owns what counts as ingested."""

    def __init__(
        self,
        store: ObjectStore,
        binding: Binding,
        *,
        lowest_unswept_window: int,
        commit: Callable[[], int],
        is_ingested: Callable[[ShardId], bool],
        starved: Callable[[], bool],
        poll_seconds: Callable[[], float],
        searcher_poll_seconds: Callable[[], float],
        give_up_seconds: float,
        foreign: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`foreign`: keys below `shards/` that are no shards and have been reported."""
        self._store = store
        self._searcher_poll_seconds = searcher_poll_seconds
        self._clock = clock
        self._binding = binding
        self._windows = Windows(lowest_unswept=lowest_unswept_window)
        self._commit = commit
        self._is_ingested = is_ingested
        self._starved = starved
        self._poll_seconds = poll_seconds
        self._queue: queue.Queue[Arrival] = queue.Queue(QUEUE_SHARDS)
        self._pending: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._queued: set[ShardId] = set()
        self._foreign = set(foreign)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._error: BaseException | None = None
        self.outage = Outage("ingest", give_up_seconds=give_up_seconds, clock=clock)
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading and wait for the thread (bounded)."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def poll_now(self) -> None:
        """Cut the current pause short."""
        self._wake.set()

    def check(self) -> None:
        """Raise the thread's error."""
        if self._error is not None:
            raise self._error

    def take(self, timeout_seconds: float) -> list[Arrival]:
        """Everything queued; waits up to `timeout_seconds` for the first. Raises the thread's error."""
        self.check()
        arrivals: list[Arrival] = []
        try:
            arrivals.append(
                self._queue.get(timeout=timeout_seconds) if timeout_seconds > 0 else self._queue.get_nowait()
            )
            while True:
                arrivals.append(self._queue.get_nowait())
        except queue.Empty:
            return arrivals

    def ingested(self, arrivals: list[Arrival]) -> None:
        """The loop has counted these as ingested (`is_ingested` says so): their windows are no longer pending."""
        with self._lock:
            for arrival in arrivals:
                if arrival.window is not None:
                    self._pending[arrival.window] -= 1
                if arrival.shard_id is not None:
                    self._queued.discard(arrival.shard_id)
            self._pending = +self._pending

    def durable_window(self) -> int:
        """`lowest_unswept_window` of a checkpoint captured now."""
        with self._lock:
            return self._windows.durable(self._pending)

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="ingest") as readers:
                while not self._stop.is_set():
                    self._poll_guarded(readers)
                    self._wake.wait(self._poll_seconds())
                    self._wake.clear()
        except BaseException as error:
            self._error = error

    def _poll_guarded(self, readers: Executor) -> None:
        try:
            with trace.span("poll"):
                self._poll(readers)
            self.outage.ended()
        except PASSING as error:
            self.outage.failed(error)

    def _poll(self, readers: Executor) -> None:
        linger = linger_for(self._searcher_poll_seconds())
        windows = self._windows.observed(self._commit(), self._clock(), linger_seconds=linger)
        plan = windows.plan(starved=self._starved())
        listing = carry_out(plan, self._store.list_after)
        for arrival in self._arrivals(listing.keys, readers):
            self._put(arrival)
            if self._stop.is_set():
                return
        with self._lock:  # only now: everything listed is queued, hence pending
            self._windows = windows.listed(plan, listing)

    def _put(self, arrival: Arrival) -> None:
        with self._lock:
            if arrival.window is not None:
                self._pending[arrival.window] += 1
            if arrival.shard_id is not None:
                self._queued.add(arrival.shard_id)
            else:
                self._foreign.add(arrival.key)
        while not self._stop.is_set():
            try:
                self._queue.put(arrival, timeout=0.5)
                return
            except queue.Full:
                continue

    def _arrivals(self, paths: Iterable[str], readers: Executor) -> Iterator[Arrival]:
        """What is new among listed keys, in their order. Raises what PASSING names, after those before it."""
        new = (path for path in paths if self._is_new(path))
        return (a for a in map_ahead(readers, self._read, new, ahead=READ_AHEAD) if a is not None)

    def _is_new(self, path: str) -> bool:
        shard_id = _shard_id(path)
        if shard_id is None:
            return path not in self._foreign
        # In this order: the loop counts a shard as ingested before it leaves `_queued`.
        return shard_id not in self._queued and not self._is_ingested(shard_id)

    def _read(self, path: str) -> Arrival | None:
        """In a reader's thread."""
        if _shard_id(path) is None:
            return Arrival(path, None, None, "not a shard key")
        try:
            return read_shard(self._store, path, self._binding)
        except NotFound:  # swept between list and get
            return None


def _shard_id(path: str) -> ShardId | None:
    try:
        key = ShardKey.parse(path)
    except ValueError:
        return None
    return ShardId(key.incarnation, key.seq)
