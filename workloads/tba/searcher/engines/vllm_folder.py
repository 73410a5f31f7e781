"""The folder of one engine: files that vLLM reads, and the sockets of its processes, which it leaves behind.

Its holder keeps a lock on it, which ends with the process however that ends: the next engine of this machine removes
what a killed one left.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Environment: where vLLM puts sockets, each named by a UUID; otherwise the temporary directory itself."""
_PREFIX = "tba-engine-"
_SOCKET_PATH_BYTES = 107
"""Of a Unix socket, on Linux."""
_UUID_BYTES = 36
_NEW_SECONDS = 60.0
"""So young a folder may be about to be locked."""


class EngineFolder:
    """A new folder within the temporary directory. Removes those of engines that were killed."""

    def __init__(self) -> None:
        remove_abandoned()
        self._directory = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self.path = Path(self._directory.name)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @contextmanager
    def holding_sockets(self) -> Iterator[None]:
        """vLLM puts its sockets here meanwhile, unless the environment says where or the path were too long for one.

        A folder in a long TMPDIR is: then vLLM does as it does without us.
        """
        if SOCKETS in os.environ or len(os.fsencode(self.path)) + 1 + _UUID_BYTES > _SOCKET_PATH_BYTES:
            yield
            return
        os.environ[SOCKETS] = str(self.path)
        try:
            yield
        finally:
            del os.environ[SOCKETS]

    def close(self) -> None:
        """Remove it with all that is there."""
        self._directory.cleanup()
        os.close(self._lock)


def remove_abandoned() -> None:
    """Remove folders of engines whose processes ended without doing so."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or just removed
            if time.time() - path.stat().st_mtime < _NEW_SECONDS:
                continue
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)
