"""A clean end on SIGTERM or Ctrl-C: a flag that a signal handler may set while the main thread waits for it."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LOOK_SECONDS = 0.05


class Stopped(BaseException):
    """A signal arrived within `StopFlag.interruptible`; not an Exception, so that nothing on the way swallows it."""


class StopFlag:
    """Has the methods of threading.Event that a loop needs, and no lock.

    A handler runs in the main thread, between two of its instructions. Event.set takes a lock; if the main thread
    holds it just then, inside Event.wait, it waits for itself for ever. Here is a plain attribute and short sleeps.
    """

    __slots__ = ("_raises", "since")

    def __init__(self) -> None:
        self._raises = False
        self.since: float | None = None
        """When somebody first asked, by time.monotonic."""

    def set(self) -> None:
        """Ask to stop."""
        if self.since is None:
            self.since = time.monotonic()

    def is_set(self) -> bool:
        """Whether somebody asked."""
        return self.since is not None

    def set_by_signal(self) -> None:
        """For a handler. Raises: Stopped within `interruptible`."""
        self.set()
        if self._raises:
            self._raises = False  # once: a second signal must not interrupt the way out
            raise Stopped

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal ends what is within, wherever it waits: for a wait that looks at no flag and has nothing to lose."""
        self._raises = True
        try:
            yield
        except Stopped:
            pass
        finally:
            self._raises = False

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds`, or until soon (50 ms) after `set`; whether it is set."""
        end = time.monotonic() + seconds
        while self.since is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
        return self.is_set()


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """A flag that SIGTERM and SIGINT set. For the main thread."""
    flag = StopFlag()

    def handle(_number: int, _frame: FrameType | None) -> None:
        flag.set_by_signal()  # and no logging: the main thread may hold the log's lock right now

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
