"""Where the training loop's time goes: seconds by phase since the step before.

```
│ ingest, wait_data ... │ collate reference forward_backward optimizer (and between them) │ stage capture wait_storage │
└ the step before ended                                              the row is written ┘  └ counts for the next row
```
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tba import telemetry, trace

Phase = Literal["wait_data", "wait_storage", "wait_engine", "ingest", "stage", "capture"]
"""What the loop itself does; the learner adds collate, reference, forward_backward and optimizer."""
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step, and of all since the step before by phase."""

    step_seconds: float
    phase_seconds: dict[str, float]
    """Sums to the time from the end of the step before to the end of this one."""

    @property
    def total_seconds(self) -> float:
        """From the end of the step before to the end of this one."""
        return sum(self.phase_seconds.values())


class Phases:
    """Sums by phase. Metrics rise with each piece, so that a long wait shows while it lasts."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def piece(self, phase: Phase) -> Iterator[None]:
        """Count the time spent inside; pieces do not nest."""
        started = self._clock()
        try:
            with trace.span(phase):
                yield
        finally:
            seconds = self._clock() - started
            self._seconds[phase] = self.seconds(phase) + seconds
            telemetry.TRAINER_SECONDS.labels(phase).inc(seconds)
            if phase.startswith("wait_"):
                telemetry.TRAINER_WAIT.labels(phase.removeprefix("wait_")).inc(seconds)

    def seconds(self, phase: Phase) -> float:
        """So far, since the last step."""
        return self._seconds.get(phase, 0.0)

    def stepped(self, step_seconds: float, parts: Mapping[str, float]) -> Timing:
        """A step of `step_seconds` has just ended, with the learner's `parts`: the next piece is another step's."""
        now = self._clock()
        within = split(step_seconds, parts)
        timing = Timing(step_seconds, split(now - self._since, {**self._seconds, **within}))
        for phase in within:  # those of the loop were counted as they passed
            telemetry.TRAINER_SECONDS.labels(phase).inc(timing.phase_seconds[phase])
        self._since, self._seconds = now, {}
        return timing


def split(whole: float, parts: Mapping[str, float]) -> dict[str, float]:
    """`parts` of `whole` seconds and the rest as "other": none negative, the sum is `whole`.

    Parts that two clocks measured may exceed the whole by a little: then all are made smaller in proportion.
    """
    known = {name: max(seconds, 0.0) for name, seconds in parts.items() if name != OTHER}
    total, whole = sum(known.values()), max(whole, 0.0)
    if total > whole:
        known = {name: seconds * (whole / total) for name, seconds in known.items()}
    return {**known, OTHER: max(whole - sum(known.values()), 0.0)}
