"""An event loop whose time is simulated: when all wait, its clock jumps to the next timer. Nothing sleeps."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Never waits; says how long it was asked to."""

    asked = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: everything waits, and no timer is set")
        found = super().select(0)
        self.asked = 0.0 if found else timeout
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time()` is simulated seconds since 0."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        self._now = 0.0
        super().__init__(self._simulated)

    def time(self) -> float:
        self._now += self._simulated.asked
        self._simulated.asked = 0.0
        return self._now


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


def now() -> float:
    """Simulated seconds."""
    return asyncio.get_running_loop().time()
