"""How long the training loop has waited since its last step, and for what."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from tba import telemetry

Cause = Literal["data", "storage"]


class Waits:
    """Sums of waits by cause. The counter rises with each piece of a wait, so that a long one shows while it lasts."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[Cause, float] = {"data": 0.0, "storage": 0.0}

    @contextmanager
    def piece(self, cause: Cause) -> Iterator[None]:
        """Count the time spent inside."""
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            self._seconds[cause] += seconds
            telemetry.TRAINER_WAIT.labels(cause).inc(seconds)

    def seconds(self, cause: Cause) -> float:
        """Waited so far."""
        return self._seconds[cause]

    def reset(self) -> None:
        """A step has been taken: the next wait is another one's."""
        self._seconds = {"data": 0.0, "storage": 0.0}
