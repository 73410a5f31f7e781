"""Keeps the newest history and progress of a run at hand, read by a thread, so that no wait for storage is ours."""

import threading
import urllib.request
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from tba.contracts.errors import StoreUnavailable
from tba.contracts.history import Progress
from tba.report.history import History, HistoryReader
from tba.store.protocol import ObjectStore

_INTERVAL_SECONDS = 1.0
_TIMEOUT_SECONDS = 2.0


class Feed:
    """Use as a context manager. `history` and `progress` are as new as the last look, about a second."""

    def __init__(self, store: ObjectStore, *, progress_port: int) -> None:
        """`progress_port`: of the trainer's HTTP server on this machine."""
        self.progress_port = progress_port
        self.history = History()
        self.progress: Progress | None = None
        """None while the trainer does not answer."""
        self._store = store
        self._reader = HistoryReader(store)
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_TIMEOUT_SECONDS + 1)
        self._store.close()

    def refresh_now(self) -> History:
        """Read the history in this thread; the old one if storage cannot be reached."""
        try:
            with self._reading:
                self.history = self._reader.refresh()
        except StoreUnavailable:
            pass  # trainer and searchers report it; what was read last is still shown
        return self.history

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self.progress = self._ask_trainer()
            self.refresh_now()

    def _ask_trainer(self) -> Progress | None:
        url = f"http://127.0.0.1:{self.progress_port}/progress"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never behind a proxy
        try:
            with opener.open(url, timeout=_TIMEOUT_SECONDS) as answer:
                return Progress.model_validate_json(answer.read())
        except (OSError, ValidationError):
            return None
