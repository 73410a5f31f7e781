"""One thread that runs one task at a time beside the training loop, and hands its errors back."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tba import trace
from tba.trainer.outage import PASSING, Outage


class Background:
    """A single-slot executor: `submit` waits while the previous task runs, and says how long it waited."""

    def __init__(
        self,
        name: str,
        *,
        give_up_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._closing = threading.Event()
        self._sleep = sleep or self._closing.wait
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.outage = Outage(name, give_up_seconds=give_up_seconds, clock=clock)

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, task: Callable[[], Any]) -> float:
        """Start `task`; returns the seconds waited for the previous one. Raises that one's error."""
        started = self._clock()
        self.join()
        waited = self._clock() - started
        self._thread = threading.Thread(target=self._run, args=(task,), name=self._name, daemon=True)
        self._thread.start()
        return waited

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the running task; False on timeout. Raises its error."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        self.check()
        return True

    def check(self) -> None:
        """Raise the error of a finished task, once."""
        if self.busy:  # it may set its error between the look and the reset below
            return
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, timeout: float = 2.0) -> None:
        """Try nothing again and wait for the thread (bounded).

        A thread amid tensors when the interpreter ends brings the whole process down with an abort.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, task: Callable[[], Any]) -> None:
        try:
            self._until_storage_answers(task)
        except BaseException as error:
            self._error = error
        finally:
            self.outage.ended()

    def _until_storage_answers(self, task: Callable[[], Any]) -> None:
        """Training goes on from the buffer while storage is down; the task is tried again until it is given up."""
        while True:
            try:
                with trace.span(self._name):
                    task()
                return
            except PASSING as error:
                waited = self.outage.failed(error)
                self._sleep(min(5.0, 0.5 + waited / 4))
                if self._closing.is_set():
                    raise
