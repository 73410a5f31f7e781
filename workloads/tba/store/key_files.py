"""S3 keys from a directory of files, one a value: a mounted Secret. Read again when it changes, so rotation is live.

Kubernetes swaps a mounted Secret by one rename of the link `..data`: values are read through one resolved directory,
never an old key with a new secret.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tba.contracts.errors import UserError
from tba.log import CONFIG_REFUSED, CONFIG_RELOADED, log

if TYPE_CHECKING:
    from obstore.store import S3Credential

KEY, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
_LOOK_SECONDS = 1.0
_READ_AGAIN_SECONDS = 60.0
"""A file system that does not stamp changes is believed for so long."""
_LINK = "..data"


class KeyFiles:
    """Call it for the current keys; looks at the files at most once a second. Thread-safe.

    Files that disappear or lose a value while a process runs change nothing: the last whole set is used on.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises: UserError if a file is missing or empty."""
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = self._now()
        self._looked_at = self._read_at = clock()
        self._values = self._read()

    def __call__(self) -> "S3Credential":
        """The keys; to be asked again soon."""
        with self._lock:
            self._look()
            key, secret, token = self._values
        # The client asks again before this, so that a new key is used at once.
        expires = datetime.now(UTC) + timedelta(seconds=_READ_AGAIN_SECONDS)
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        stamp = self._now()
        if stamp == self._stamp and now - self._read_at < _READ_AGAIN_SECONDS:
            return
        self._stamp, self._read_at = stamp, now
        try:
            values = self._read()
        except UserError as error:
            log.warning(CONFIG_REFUSED, error=str(error))
            return
        if values != self._values:
            self._values = values
            log.info(CONFIG_RELOADED, directory=str(self._directory))

    def _now(self) -> tuple[object, ...]:
        return tuple(_stamp(self._directory / name) for name in (_LINK, KEY, SECRET, TOKEN))

    def _read(self) -> tuple[str, str, str | None]:
        link = self._directory / _LINK
        folder = link.resolve() if link.exists() else self._directory
        key, secret, token = (_text(folder / name) for name in (KEY, SECRET, TOKEN))
        if not key or not secret:
            raise UserError(self._missing(KEY if not key else SECRET))
        return key, secret, token

    def _missing(self, name: str) -> str:
        try:
            found = sorted(n for n in os.listdir(self._directory) if not n.startswith("."))
        except OSError:
            found = []
        return (
            f"TBA_CREDENTIALS_DIR {self._directory} has no {name} with a value, got the files {found or 'none'}: "
            f"give the Secret that storage.credentials names the keys {KEY} and {SECRET} ({TOKEN} for temporary ones)"
        )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()  # through links
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _text(path: Path) -> str | None:
    """Without the newline that editors and `--from-file` leave; None if there is nothing."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
