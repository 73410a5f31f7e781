"""One fetch a host: searchers that share a directory read each weights file from storage once.

    wanted file ─► in the directory, right by size and hash? ─► done
               └─► lock ─► look again ─► read from storage, verify ─► temporary file ─► rename

Files are named by their run and hash, so a name has one content for ever, a damaged or cut file is found out and
replaced, and no run makes room at the expense of another.
A process that is killed leaves its lock to the kernel and a temporary file to the next one. Whatever goes wrong here (a
full disk, a holder that hangs) costs a read from storage and nothing else.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tba.contracts.errors import UserError
from tba.contracts.records import FileEntry
from tba.hashing import xxh3_128

VARIABLE = "TBA_WEIGHTS_CACHE"
"""Environment: the directory, on a file system that all searchers of this host see and only they write."""
_LOCK_SECONDS = 120.0
_HASH = re.compile(r"[0-9a-f]{32}")
_SUFFIX, _PARTIAL = ".weights", ".partial"
_ABANDONED_SECONDS = 3600.0  # a temporary file so old belongs to nobody
_ENDED_SECONDS = 86400.0  # a run that has used no file for so long has ended


class HostCache:
    """Thread-safe and safe between processes."""

    def __init__(self, directory: Path, *, lock_seconds: float = _LOCK_SECONDS) -> None:
        """Raises: UserError if the directory cannot be made, or belongs to somebody else."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = directory.stat().st_uid
        except OSError as error:
            raise UserError(f"{VARIABLE}={directory}: {error}: name a directory that searchers may write") from error
        if owner != os.geteuid():
            raise UserError(f"{VARIABLE}={directory} belongs to user {owner}, not to {os.geteuid()}: use another one")
        self._directory = directory
        self._lock_seconds = lock_seconds

    @classmethod
    def from_environment(cls) -> "HostCache | None":
        """None unless TBA_WEIGHTS_CACHE is set. Raises: UserError."""
        directory = os.environ.get(VARIABLE)
        return cls(Path(directory)) if directory else None

    def read(self, run: str, entry: FileEntry, target: memoryview, fetch: Callable[[], None]) -> None:
        """Fill `target` from the directory, or by `fetch`, which must raise unless it fills it with the right bytes.

        `run`: URI of its storage.
        """
        if not _HASH.fullmatch(entry.hash):  # it came from outside and would become a path
            fetch()
            return
        path = self._path(run, entry)
        if _load(path, entry, target):
            return
        with self._locked(entry.hash) as locked:
            if locked and _load(path, entry, target):
                return  # somebody else has just read it
            fetch()
            if locked:
                _save(path, target)

    def touch(self, run: str, entries: Sequence[FileEntry]) -> None:
        """These files are in use, though nobody reads them now."""
        for entry in entries:
            with suppress(OSError):
                os.utime(self._path(run, entry))

    def prune(self, run: str, max_bytes: int) -> None:
        """Remove the run's files, the longest unused first, until the others take at most `max_bytes`.

        And what was abandoned, by whatever run.
        """
        self._remove_unused(_PARTIAL, _ABANDONED_SECONDS)
        self._remove_unused(_SUFFIX, _ENDED_SECONDS)
        used: list[tuple[float, int, Path]] = []
        for path in self._directory.glob(f"{_prefix(run)}*{_SUFFIX}"):
            with suppress(OSError):
                found = path.stat()
                used.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in used)
        for _, size, path in sorted(used):
            if total <= max_bytes:
                return
            with suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, run: str, entry: FileEntry) -> Path:
        return self._directory / f"{_prefix(run)}{entry.hash}{_SUFFIX}"

    def _remove_unused(self, suffix: str, seconds: float) -> None:
        for path in self._directory.glob(f"*{suffix}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > seconds:
                    path.unlink()

    @contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Hold one of 16 locks; False if that took too long or cannot be."""
        try:
            file = os.open(self._directory / f"lock-{name[:1]}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield False
            return
        try:
            yield self._wait_for(file)
        finally:
            os.close(file)

    def _wait_for(self, file: int) -> bool:
        deadline = time.monotonic() + self._lock_seconds
        while time.monotonic() < deadline:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.05)
        return False


def _prefix(run: str) -> str:
    return f"{xxh3_128(run.encode())[:16]}-"


def _load(path: Path, entry: FileEntry, target: memoryview) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != entry.size:
                return False
            done = 0
            while done < len(target) and (count := file.readinto(target[done:])):
                done += count
        if done != len(target) or xxh3_128(target) != entry.hash:
            return False
        os.utime(path)
    except OSError:
        return False
    return True


def _save(path: Path, data: memoryview) -> None:
    """Under the lock, so that no two write the same temporary file; what a killed one left there is overwritten."""
    partial = path.with_suffix(_PARTIAL)
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
