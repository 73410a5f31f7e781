"""What a running trainer sits out: storage that does not answer, or refuses while credentials or rights change."""

import time
from collections.abc import Callable

from tba.contracts.errors import StoreUnavailable
from tba.log import STORAGE_FAILED, log
from tba.store import AccessDenied, OutOfSpace
from tba.store.retry import Trouble

PASSING = (StoreUnavailable, AccessDenied)
"""Errors that may pass by themselves. At the start of a process AccessDenied is final, afterwards it is not."""


class Outage:
    """The failures in a row of one activity. Its thread notes them; others may look."""

    def __init__(self, task: str, *, give_up_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._give_up_seconds = give_up_seconds
        self._clock = clock
        self._what = ""
        self.since: float | None = None
        """Time of `clock` of the first failure; None while storage does what it is asked."""
        self.trouble: Trouble | None = None
        """The same in unix seconds, with the newest error."""

    def failed(self, error: Exception) -> float:
        """Note a failure; returns the seconds since the first. Raises: `error`, once they have lasted too long."""
        now = self._clock()
        self._what = _what(error)
        if self.since is None:
            self.since = now
        self.trouble = Trouble(self.trouble.since if self.trouble else time.time(), str(error))
        waited = now - self.since
        log.warning(STORAGE_FAILED, task=self._task, waited_seconds=round(waited, 1), error=str(error))
        if waited > self._give_up_seconds:
            raise error
        return waited

    def ended(self) -> None:
        """Storage has done what it was asked."""
        self.since = self.trouble = None

    @property
    def description(self) -> str:
        """What a person is told; empty while there is no outage."""
        since = self.since  # read once: the thread resets it
        if since is None:
            return ""
        seconds = self._clock() - since
        # The first failure ends a call that may have lasted for minutes: "for 0 s" would be wrong.
        return f"storage has {self._what}" + (f" for {seconds:.0f} s" if seconds >= 1 else "")


def _what(error: Exception) -> str:
    if isinstance(error, OutOfSpace):
        return "had no space left"
    return "denied access" if isinstance(error, AccessDenied) else "not answered"
