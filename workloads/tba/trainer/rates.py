"""How fast the trainer learns and a searcher delivers, over the last minutes: what the autoscaler decides from."""

import threading
from collections import deque
from dataclasses import dataclass, field

from tba.protocol.liveness import ALIVE_SECONDS

WINDOW_SECONDS = 120.0
LEAST_STEPS = 10
"""Kept beyond the window: the speed of a trainer that waits is that of its last steps."""
LEAST_UP_SECONDS = 5.0
"""Of a searcher, between the shards that its rate is taken from."""


@dataclass(slots=True)
class _Deliveries:
    """One searcher process: (its own seconds since its start, rows delivered by then), oldest first."""

    points: deque[tuple[float, float]] = field(default_factory=deque)
    last_seen: float = 0.0

    def add(self, rows: float, up_seconds: float) -> None:
        total = rows + (self.points[-1][1] if self.points else 0)
        if self.points and up_seconds <= self.points[-1][0]:  # an older shard that came late
            self.points[-1] = self.points[-1][0], total
            return
        self.points.append((up_seconds, total))
        while len(self.points) > 2 and self.points[1][0] <= up_seconds - WINDOW_SECONDS:
            self.points.popleft()

    def rate(self) -> float | None:
        if not self.points:
            return None
        (began, before), (ended, total) = self.points[0], self.points[-1]
        return (total - before) / (ended - began) if ended - began >= LEAST_UP_SECONDS else None


class Rates:
    """Thread-safe: the loop tells, HTTP threads ask. `now` is in seconds of any one clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warm = False
        self._steps: deque[tuple[float, float]] = deque()
        self._searchers: dict[str, _Deliveries] = {}

    def stepped(self, busy_seconds: float, now: float) -> None:
        """A step took so long without waits. The first of a process is left out: it compiles and allocates."""
        with self._lock:
            if self._warm:
                self._steps.append((now, busy_seconds))
            self._warm = True
            while len(self._steps) > LEAST_STEPS and self._steps[0][0] < now - WINDOW_SECONDS:
                self._steps.popleft()

    def delivered(self, incarnation: str, rows: float, up_seconds: float, now: float) -> None:
        """A shard came. Time is the searcher's own: what a trainer finds after an absence comes at once."""
        with self._lock:
            deliveries = self._searchers.setdefault(incarnation, _Deliveries())
            deliveries.add(rows, up_seconds)
            deliveries.last_seen = now

    def steps_per_busy_second(self) -> float | None:
        """None until known."""
        with self._lock:
            busy = sum(seconds for _, seconds in self._steps)
            return len(self._steps) / busy if busy > 0 else None

    def trajectories_per_searcher_second(self, now: float) -> float | None:
        """Mean over the searchers heard of lately; None until one's is known."""
        with self._lock:
            self._searchers = {i: d for i, d in self._searchers.items() if now - d.last_seen <= WINDOW_SECONDS}
            heard = [d for d in self._searchers.values() if now - d.last_seen <= ALIVE_SECONDS]
            rates = [rate for d in heard if (rate := d.rate()) is not None]
        return sum(rates) / len(rates) if rates else None
