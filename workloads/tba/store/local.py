"""A store in a local directory: for one host, or several over a file system with hard links and flock.

put_once = complete temporary file + link(2), which fails if the name exists; cas = flock + rename(2).
A reader opens a name that always holds a complete file, so no read is torn. A crash leaves a temporary
file and nothing else; old ones are removed at the next start.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tba.contracts.errors import CorruptObject, UserError
from tba.store.protocol import (
    MAX_CAS_BYTES,
    RESERVED,
    AccessDenied,
    AlreadyExists,
    Conflict,
    NotFound,
    ObjectInfo,
    OutOfSpace,
    Readable,
    StoredObject,
    check_key,
    check_prefix,
    flat_view,
)
from tba.store.retry import Observer, Retrier, RetryPolicy, Transient, WaitListener, Weather

T = TypeVar("T")
_TEMPORARY_MAX_AGE_SECONDS = 86400.0
_PART_BYTES = 64 << 20
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = {errno.ENOSPC, errno.EDQUOT}
# Failing disks and stale network handles may recover; the rest are bugs and crash.
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOLCK, errno.EMFILE}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}


class LocalStore:
    """`ObjectStore` over the directory `root`, which is made at the first write."""

    def __init__(
        self,
        root: Path,
        *,
        retry: RetryPolicy | None = None,
        observe: Observer | None = None,
        weather: Weather | None = None,
        on_wait: WaitListener | None = None,
        part_bytes: int = _PART_BYTES,
        num_threads: int = 4,
    ) -> None:
        self._root = root.absolute()
        for folder in (self._root, *self._root.parents):
            if folder.exists() and not folder.is_dir():
                raise UserError(f"storage directory {self._root}: {folder} is a file; name a directory")
        self.uri = f"file://{self._root}"
        self._private = self._root / RESERVED
        self._part_bytes = part_bytes
        policy = retry or RetryPolicy()
        self._retrier = Retrier(policy, observe=observe, weather=weather, place=lambda: self.uri, on_wait=on_wait)
        self._lock_retrier = Retrier(
            replace(
                policy,
                budget_seconds=min(policy.budget_seconds, policy.request_timeout_seconds),
                max_attempts=1_000_000,
                base_delay_seconds=0.001,
                max_delay_seconds=0.02,
            )
        )
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tba-local-store")
        self._sweep_temporary_files()

    def get(self, key: str) -> StoredObject:
        """See ObjectStore.get."""
        return self._call("get", key, lambda: _read_object(self._path(key)))

    def get_if_changed(self, key: str, etag: str | None) -> StoredObject | None:
        """See ObjectStore.get_if_changed."""
        found = self.get(key)
        return None if found.etag == etag else found

    def head(self, key: str) -> ObjectInfo:
        """See ObjectStore.head."""
        return self._call("head", key, lambda: _describe(key, self._path(key)))

    def put_once(self, key: str, data: Readable) -> None:
        """See ObjectStore.put_once."""
        view = flat_view(data)
        self._call("put_once", key, lambda: self._create(key, view))

    def cas(self, key: str, data: bytes, etag: str | None) -> str:
        """See ObjectStore.cas."""
        if len(data) > MAX_CAS_BYTES:
            raise ValueError(f"cas takes at most {MAX_CAS_BYTES} bytes, got {len(data)} for {key!r}")
        return self._call("cas", key, lambda: self._swap(key, data, etag))

    def read_into(self, key: str, target: memoryview, *, offset: int = 0) -> None:
        """See ObjectStore.read_into."""
        view = flat_view(target, writable=True)
        self._call("read_into", key, lambda: self._read_parts(key, view, offset))

    def list_after(self, prefix: str, after: str | None = None) -> Iterator[ObjectInfo]:
        """See ObjectStore.list_after."""
        folder = self._root / check_prefix(prefix) if prefix else self._root
        return self._walk(folder, prefix, after or "")

    def delete(self, keys: Iterable[str]) -> None:
        """See ObjectStore.delete."""
        for key in keys:
            path = self._path(key)
            self._call("delete", key, lambda path=path: self._remove(path))

    def now(self) -> float:
        """See ObjectStore.now: the clock that stamps files, which is the server's on a network file system."""

        def stamp() -> float:
            with self._temporary(memoryview(b"")) as path:
                return path.stat().st_mtime

        return self._call("now", "", stamp)

    def close(self) -> None:
        """See ObjectStore.close."""
        self._threads.shutdown(wait=True)

    def _walk(self, folder: Path, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Depth first in the order of whole keys: a directory sorts as its name followed by a slash."""
        try:
            found = self._call("list", prefix, lambda: _scan(folder, prefix, after))
        except NotFound:
            return
        for key, info in found:
            if info is None:
                yield from self._walk(self._root / key, key, after)
            else:
                yield info

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _call(self, operation: str, key: str, action: Callable[[], T]) -> T:
        subject = f"{self.uri}/{key}"

        def attempt() -> T:
            try:
                return action()
            except _MISSING as error:
                raise NotFound(subject) from error
            except PermissionError as error:
                raise AccessDenied(f"{operation} {subject}: {error}; give this user access to {self._root}") from error
            except OSError as error:
                if error.errno == errno.EROFS:
                    raise UserError(f"{operation} {subject}: {error}; name a writable directory") from error
                if error.errno in _FULL:
                    raise OutOfSpace(f"{operation} {subject}: {error}; free some space at {self._root}") from error
                if error.errno in _PASSING:
                    raise Transient(str(error)) from error
                raise

        return self._retrier.call(operation, subject, attempt, remedy=f"check disk space and health of {self._root}")

    def _create(self, key: str, view: memoryview) -> None:
        path = self._path(key)
        with self._temporary(view) as temporary:
            _make_folder(path.parent)
            try:
                os.link(temporary, path)
            except FileExistsError:
                if not _same_bytes(path, view):
                    raise AlreadyExists(f"{self.uri}/{key} exists with other bytes") from None
            except FileNotFoundError as error:
                # delete() of the last sibling removed the folder between the two lines above.
                raise Transient(str(error)) from error
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise UserError(
                        f"cannot link files in {self._root}: {error}; use a file system with hard links, or S3"
                    ) from error
                raise
            _sync_folder(path.parent)

    def _swap(self, key: str, data: bytes, etag: str | None) -> str:
        path = self._path(key)
        with self._temporary(memoryview(data)) as temporary, self._locked():
            try:
                current = _read_object(path).etag
            except FileNotFoundError:
                current = None
            if current != etag:
                raise Conflict(f"{self.uri}/{key} is at {current}, expected {etag}")
            _make_folder(path.parent)
            os.replace(temporary, path)
            _sync_folder(path.parent)
        return _content_etag(data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The directory's one lock, waited for within bounds: a stopped holder must not stop everybody for ever."""
        path = self._private / "cas.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

        def lock() -> None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Transient("another process holds the lock") from error

        try:
            self._lock_retrier.call("lock", str(path), lock, remedy="find a stopped process that uses this directory")
            yield
        finally:
            os.close(descriptor)  # also unlocks

    @contextlib.contextmanager
    def _temporary(self, view: memoryview) -> Iterator[Path]:
        """A complete, synced file on the same file system; gone afterwards unless renamed."""
        folder = self._private / "tmp"
        _make_folder(folder)
        path = folder / secrets.token_hex(16)
        try:
            with open(path, "xb", buffering=0) as file:
                written = 0
                while written < len(view):
                    written += file.write(view[written:])
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _sweep_temporary_files(self) -> None:
        """Remove what crashed writers left more than a day ago."""
        with contextlib.suppress(OSError):
            for path in (self._private / "tmp").iterdir():
                if time.time() - path.stat().st_mtime > _TEMPORARY_MAX_AGE_SECONDS:
                    path.unlink(missing_ok=True)

    def _read_parts(self, key: str, view: memoryview, offset: int) -> None:
        with open(self._path(key), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if offset + len(view) > size:
                raise CorruptObject(f"{self.uri}/{key} has {size} bytes, need {offset}..{offset + len(view)}")
            starts = range(0, len(view), self._part_bytes)
            if len(starts) <= 1:
                _read_at(file.fileno(), view, offset)
                return
            parts = [(view[i : i + self._part_bytes], offset + i) for i in starts]
            # list() waits for every part even after a failure is stored, so nobody writes to `view` later.
            futures = [self._threads.submit(_read_at, file.fileno(), *part) for part in parts]
            for error in [future.exception() for future in futures]:
                if error:
                    raise error

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(*_MISSING):
            path.unlink()
        for folder in path.parents:
            if folder == self._root or not folder.is_relative_to(self._root):
                return
            try:
                folder.rmdir()
            except OSError:
                return


def _read_at(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise CorruptObject(f"file ends at {offset + done}, need {offset + len(view)} bytes")
        done += count


def _read_object(path: Path) -> StoredObject:
    with open(path, "rb", buffering=0) as file:
        data = file.read()
        return StoredObject(data, _etag(data, os.fstat(file.fileno())))


def _describe(key: str, path: Path) -> ObjectInfo:
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        data = file.read() if status.st_size <= MAX_CAS_BYTES else b""
        return ObjectInfo(key, status.st_size, _etag(data, status), status.st_mtime)


def _etag(data: bytes, status: os.stat_result) -> str:
    """By content for anything `cas` may write; larger objects never change, so their identity is enough."""
    if status.st_size <= MAX_CAS_BYTES:
        return _content_etag(data)
    return _identity(status)


def _identity(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _content_etag(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _same_bytes(path: Path, view: memoryview) -> bool:
    chunk = bytearray(min(1 << 20, len(view)))
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != len(view):
            return False
        for start in range(0, len(view), len(chunk) or 1):
            piece = memoryview(chunk)[: min(len(chunk), len(view) - start)]
            _read_at(file.fileno(), piece, start)
            if piece != view[start : start + len(piece)]:
                return False
    return True


def _scan(folder: Path, prefix: str, after: str) -> list[tuple[str, ObjectInfo | None]]:
    """A directory's keys that matter, in order, each with its object; None for a directory, whose key ends in a slash.

    Nothing is opened: a run has many objects, and who lists them wants keys, sizes and times.
    """
    found: list[tuple[str, ObjectInfo | None]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            key = prefix + entry.name + ("/" if is_folder else "")
            if key == RESERVED + "/" or (key <= after and not (is_folder and after.startswith(key))):
                continue
            if is_folder:
                found.append((key, None))
                continue
            with contextlib.suppress(*_MISSING):  # deleted since the scan: no longer listed
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    found.append((key, ObjectInfo(key, status.st_size, _identity(status), status.st_mtime)))
    return sorted(found, key=lambda each: each[0])


def _make_folder(folder: Path) -> None:
    """Like mkdir -p, and durable: every new entry is synced in its parent."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise ValueError(f"{folder} is an object, so no key may go on below it") from None
    except FileNotFoundError as error:
        if folder.parent.is_dir():  # a file system such as /proc
            raise UserError(f"the directory {folder} cannot be made: {error}; name one that can hold files") from error
        raise Transient(str(error)) from error  # delete() of the last sibling removed the parent just now
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
