"""How a command waits for storage when a person waits for the command."""

import sys
import threading
import time
from collections.abc import Callable

from tba.store import RetryPolicy, Wait

ATTENDED = RetryPolicy(first_budget_seconds=30.0)
"""Storage that has served this command once comes back: insisting as a trainer does lets `tba watch` or a long export
outlive its restart. Storage that never has is more likely a mistyped address, or a port that is not forwarded: nobody
should look at that for two minutes, and trying again by hand costs nothing.
"""
_SILENT_SECONDS = 3.0
_AGAIN_SECONDS = 30.0


class WaitTeller:
    """Says on standard error what a store waits for: within 3 s, then every half a minute. Any thread may call it."""

    def __init__(
        self, *, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say or _on_stderr
        self._clock = clock
        self._lock = threading.Lock()
        self._said_at: float | None = None

    def __call__(self, wait: Wait) -> None:
        """Before a sleep of the store."""
        if wait.seconds < _SILENT_SECONDS:
            return
        with self._lock:  # a large object is read by several threads, which all wait
            now = self._clock()
            if self._said_at is not None and now - self._said_at < _AGAIN_SECONDS:
                return
            self._said_at = now
        self._say(
            f"waiting for storage at {wait.place}: {wait.cause}; giving up within {wait.left_seconds:.0f} s; "
            "Ctrl-C ends it"
        )


def _on_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # looked up now: a live panel puts lines above itself
    sys.stderr.flush()
