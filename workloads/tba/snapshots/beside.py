"""A call that runs beside its caller, in a thread that an ending process does not wait for.

An executor's threads are joined at exit: with storage down a pod would outlive its grace by the whole retry budget.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """Starts at once; `result` waits for it and gives its value, or raises its error."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended, well or not; at most so long."""
        self._thread.join(seconds)

    def result(self) -> T:
        """Raises: what the call raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._values[0]

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._values.append(work())
        except BaseException as error:
            self._error = error
