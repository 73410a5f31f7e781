"""The work queue: a key waits in it once, is worked on by one worker at a time, and comes back later if asked to.

    add ──▶ waiting (due time) ──get──▶ active ──done──▶ gone
                 ▲                        │ add, retry meanwhile
                 └────────────────────────┘

For one event loop; not thread-safe. Time is the loop's own clock, so that a simulated loop needs no patience.
"""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_SECONDS = 0.2
MAX_RETRY_SECONDS = 30.0


class WorkQueue(Generic[K]):
    """Keys to be reconciled."""

    def __init__(self, *, jitter: Callable[[], float] = random.random) -> None:
        """`jitter` is drawn from [0, 1) for each retry."""
        self._jitter = jitter
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # may hold entries that `_due` has overtaken
        self._order = itertools.count()
        self._active: dict[K, float | None] = {}  # due time of the next round, if one was asked for meanwhile
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, key: K, after_seconds: float = 0.0) -> None:
        """Have the key worked on after a delay; of several requests the earliest counts."""
        if self._closed:
            return
        due = self._now() + max(after_seconds, 0.0)
        if key in self._active:
            known = self._active[key]
            self._active[key] = due if known is None else min(known, due)
        elif key not in self._due or due < self._due[key]:
            self._due[key] = due
            heapq.heappush(self._heap, (due, next(self._order), key))
            self._wake()

    def retry(self, key: K) -> float:
        """Add the key after its backoff: 0.2 s, doubled with each retry up to 30 s, minus up to half at random."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        # 2**8 * 0.2 s is beyond the maximum: a larger exponent only risks an overflow.
        delay = min(FIRST_RETRY_SECONDS * 2 ** min(failures, 8), MAX_RETRY_SECONDS) * (1 - self._jitter() / 2)
        self.add(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """The key was worked on without error: its next retry is quick again."""
        self._failures.pop(key, None)

    async def get(self) -> K | None:
        """The next key that is due; it is active until `done`. None: the queue is closed."""
        while not self._closed:
            wait = self._next_due()
            if wait is not None and wait <= 0:
                key = heapq.heappop(self._heap)[2]
                del self._due[key]
                self._active[key] = None
                return key
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()
        return None

    def done(self, key: K) -> None:
        """The worker has finished with the key; what was added meanwhile becomes due."""
        again = self._active.pop(key)
        if again is not None:
            self.add(key, again - self._now())

    def close(self) -> None:
        """No key is handed out any more."""
        self._closed = True
        self._wake()

    @property
    def depth(self) -> int:
        """Keys that are due and no worker has taken yet."""
        now = self._now()
        return sum(due <= now for due in self._due.values())

    def _next_due(self) -> float | None:
        """Seconds until the next key is due; None: there is none."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due:
                return due - self._now()
            heapq.heappop(self._heap)
        return None

    def _wake(self) -> None:
        # Resolves those who wait now; who comes later waits for the next change.
        self._changed.set()
        self._changed.clear()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
