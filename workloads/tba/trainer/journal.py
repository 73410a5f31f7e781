"""Append-only logs of one epoch in the bucket: run history (`metrics/`) and ingest log (`ingest/`).

Rows gather in memory; `seal` closes the open object, `flush` makes sealed objects durable in order. A checkpoint
seals when it is captured and flushes before it commits, so a checkpoint never runs ahead of its logs.
"""

import threading
from collections import deque

from tba.contracts.base import Contract
from tba.contracts.keys import LogKey
from tba.store import ObjectStore


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
        """Write sealed objects. Raises: StoreUnavailable; what is not written stays sealed."""
        with self._flushing:
            while True:
                with self._lock:
                    if not self._sealed:
                        return
                    seq, data = self._sealed[0]
                self._store.put_once(LogKey(self._kind, self._epoch, seq).path, data)
                with self._lock:
                    self._sealed.popleft()
