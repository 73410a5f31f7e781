"""Append-only logs of one epoch in the bucket: run history (`metrics/`) and ingest log (`ingest/`).

Rows gather in memory; `seal` closes the open object, `flush` makes sealed objects durable in order. A checkpoint
seals when it is captured and flushes before it commits, so a checkpoint never runs ahead of its logs.
"""

import threading
from collections import deque
from collections.abc import Sequence

from tba.contracts.base import Contract
from tba.contracts.keys import LogKey
from tba.store import ObjectStore
from tba.trainer.outage import PASSING, Outage

FLUSH_SECONDS = 2.0


class Journal:
    """Writer of one log. Thread-safe: the loop appends, background threads flush."""

    def __init__(self, store: ObjectStore, kind: str, epoch: int) -> None:
        self._store = store
        self._kind = kind
        self._epoch = epoch
        self._open: list[bytes] = []
        self._sealed: deque[tuple[int, bytes]] = deque()
        self._next_seq = 0
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def append(self, row: Contract) -> None:
        """Add a row to the open object."""
        line = row.to_json()
        with self._lock:
            self._open.append(line)

    def seal(self) -> int:
        """Close the open object; returns the number of objects sealed so far."""
        with self._lock:
            if self._open:
                self._sealed.append((self._next_seq, b"\n".join(self._open) + b"\n"))
                self._next_seq += 1
                self._open = []
            return self._next_seq

    def flush(self) -> None:
        """Write sealed objects. Raises: StoreUnavailable, AccessDenied; what is not written stays sealed."""
        with self._flushing:
            while True:
                with self._lock:
                    if not self._sealed:
                        return
                    seq, data = self._sealed[0]
                self._store.put_once(LogKey(self._kind, self._epoch, seq).path, data)
                with self._lock:
                    self._sealed.popleft()


class Flusher:
    """A thread that seals and flushes journals every few seconds, between checkpoints too."""

    def __init__(
        self, journals: Sequence[Journal], *, give_up_seconds: float, interval_seconds: float = FLUSH_SECONDS
    ) -> None:
        self._journals = journals
        self._interval_seconds = interval_seconds
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self.outage = Outage("journal", give_up_seconds=give_up_seconds)
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        """Begin flushing."""
        self._thread.start()

    def close(self) -> None:
        """Stop and wait for the thread (bounded)."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def check(self) -> None:
        """Raise the thread's error."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._interval_seconds):
                self._flush_guarded()
        except BaseException as error:
            self._error = error

    def _flush_guarded(self) -> None:
        try:
            for journal in self._journals:
                journal.seal()
                journal.flush()
            self.outage.ended()
        except PASSING as error:
            self.outage.failed(error)
