"""The newest readable `live.json` of a configuration directory, or given settings for a process that has none."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic.alias_generators import to_camel

from tba.contracts.config import LIVE_BUFFER_FIELDS, Buffer, LiveConfig
from tba.contracts.errors import UserError
from tba.contracts.runfile import LIVE_FILE, read_live_config
from tba.log import CONFIG_REFUSED, CONFIG_RELOADED, log

_LOOK_SECONDS = 1.0


class LiveSettings:
    """Call it for the current settings; looks at the file at most once a second. A broken file changes nothing.

    Thread-safe.
    """

    def __init__(
        self, directory: Path | None, default: LiveConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises: UserError if the directory's file cannot be read now."""
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._stamp = self._now()
        if directory is None:
            assert default is not None, "settings come from a directory or from the caller"
            self._current = default
        else:
            self._current = read_live_config(directory)

    def __call__(self) -> LiveConfig:
        """The settings."""
        if self._directory is None:
            return self._current
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= _LOOK_SECONDS:
                self._looked_at = now
                self._look(self._directory)
            return self._current

    def _now(self) -> tuple[int, int] | None:
        if self._directory is None:
            return None
        try:
            found = (self._directory / LIVE_FILE).stat()  # follows the links by which Kubernetes swaps a mounted file
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _look(self, directory: Path) -> None:
        stamp = self._now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            found = read_live_config(directory)
            _require_live(found, self._current)
            self._current = found
        except UserError as error:
            log.error(CONFIG_REFUSED, error=str(error))
        else:
            log.info(CONFIG_RELOADED, directory=str(directory))


def _require_live(new: LiveConfig, old: LiveConfig) -> None:
    """Raises: UserError if a field of the buffer differs that is the run's for good."""
    for name in Buffer.model_fields:
        got, fixed = getattr(new.buffer, name), getattr(old.buffer, name)
        if got != fixed and name not in LIVE_BUFFER_FIELDS:
            live = ", ".join(f"buffer.{to_camel(n)}" for n in LIVE_BUFFER_FIELDS)
            raise UserError(
                f"{LIVE_FILE}: buffer.{to_camel(name)} is {fixed} for the life of the run, got {got}: "
                f"change it back, or start another run; live are {live}"
            )
