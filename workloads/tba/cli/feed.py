"""Keeps the newest history and progress of a run at hand, read by a thread, so that no wait for storage is ours."""

import http.client
import threading
import urllib.request
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pydantic import ValidationError

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
        self.problem = ""
        """Why the last look failed; empty if it did not."""
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

    def first_look(self) -> History:
        """Read the history in this thread. Raises: UserError, StoreUnavailable."""
        self._read()
        return self.history

    def refresh_now(self) -> History:
        """Read the history in this thread; the old one if that fails."""
        self._attempt(self._read)
        return self.history

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self._attempt(self._look)

    def _attempt(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:  # the top of the thread: it must outlive whatever cannot be read just now
            self.problem = f"{type(error).__name__}: {error}"
        else:
            self.problem = ""

    def _look(self) -> None:
        self.progress = self._ask_trainer()
        self._read()

    def _read(self) -> None:
        with self._reading:
            self.history = self._reader.refresh()

    def _ask_trainer(self) -> Progress | None:
        url = f"http://127.0.0.1:{self.progress_port}/progress"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never behind a proxy
        try:
            with opener.open(url, timeout=_TIMEOUT_SECONDS) as answer:
                return Progress.model_validate_json(answer.read())
        except TimeoutError:
            return self.progress  # it is there, and busy
        except (OSError, http.client.HTTPException, ValidationError):
            return None
