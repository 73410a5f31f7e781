"""Finished visits on their way to the bucket: rows ─► shard file on local disk ─► object, exactly once.

A shard gets its window, and so its key, at the first attempt to upload it; the file's name then keeps that key, also
over a crash: whoever finds the file uploads it under the same key, and put_once makes a repetition harmless.
Each process works in a folder of its own (named by its incarnation, held by a lock), and adopts those of dead ones.
"""

import fcntl
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tba import trace
from tba.contracts.errors import CorruptObject, StoreUnavailable
from tba.contracts.keys import ShardKey
from tba.contracts.records import ShardHeader, Trajectory
from tba.failpoints import failpoint
from tba.log import SHARD_SPOOLED, SHARD_UPLOADED, STORAGE_RETRIED, log
from tba.shards import decode_shard, encode_shard
from tba.store import AccessDenied, AlreadyExists, ObjectStore

_UNKEYED = "unkeyed"
_REFUSED = ".refused"
_PARTIAL = ".part"
_LOCK = "lock"
_ROW_BYTES = 64  # of a row's fixed columns, roughly


@dataclass(frozen=True, slots=True)
class SpoolLimits:
    """When a shard is cut, and how much may wait for storage."""

    shard_bytes: int = 8 * 2**20  # before compression
    shard_seconds: float = 5.0  # age of the oldest row
    cap_bytes: int = 2**30  # on disk


def shard_seconds(poll_interval_seconds: float) -> float:
    """Rows should not wait much longer for an upload than weights do for a poll."""
    return min(5.0, 2.0 * poll_interval_seconds)


@dataclass(slots=True)
class _Pending:
    path: Path
    size: int
    searcher: str
    incarnation: str
    seq: int
    rows: int
    key: ShardKey | None = None  # None until the first attempt


@dataclass(slots=True)
class SpoolCounts:
    """Since the start of the process."""

    shards: int = 0
    rows: int = 0
    upload_bytes: int = 0
    refused: int = 0
    adopted: int = 0
    unavailable: int = 0
    errors: list[str] = field(default_factory=list)


class Spool:
    """`add`, `tick` and `flush` are for the loop's thread; uploads run in the spool's own thread after `start`."""

    def __init__(
        self,
        store: ObjectStore,
        directory: Path,
        *,
        header: Callable[[int], ShardHeader],
        window: Callable[[], int],
        limits: Callable[[], SpoolLimits],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` is shared by all processes of this searcher name and run. Adopts what dead ones left there."""
        self._store = store
        self._header, self._window, self._limits = header, window, limits
        self._clock = clock
        self._rng = random.Random()  # of its own: an engine seeds the module's alike in every searcher
        first = header(0)
        self._run, self._searcher, self._incarnation = first.run, first.searcher, first.incarnation
        self._folder = directory / first.incarnation
        self._lock_file = _new_folder(self._folder)
        self._guard = threading.Condition()
        self._pending: list[_Pending] = []
        self._rows: list[Trajectory] = []
        self._row_bytes = 0
        self._since = 0.0
        self._seq = 0
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._inherited: list[tuple[Path, int]] = []
        for folder in sorted(directory.iterdir()):
            self._adopt(folder)
        self.counts = SpoolCounts()
        self.counts.adopted = len(self._pending)
        self.detail = ""
        """Why the last upload failed; empty while storage answers."""

    @property
    def pending_shards(self) -> int:
        """Shards not yet in the bucket."""
        with self._guard:
            return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        """Bytes of them, and of rows not yet cut."""
        with self._guard:
            return sum(p.size for p in self._pending) + self._row_bytes

    @property
    def full(self) -> bool:
        """Whether generation must pause until storage answers."""
        return self.pending_bytes >= self._limits().cap_bytes

    def start(self) -> None:
        """Begin uploading."""
        self._thread = threading.Thread(target=self._run_uploads, name="spool", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the uploads."""
        if self._error is not None:
            raise self._error

    def add(self, rows: list[Trajectory]) -> None:
        """A finished visit; cuts a shard if enough rows are together."""
        if not self._rows:
            self._since = self._clock()
        self._rows += rows
        self._row_bytes += sum(_ROW_BYTES + 4 * _numbers(r) for r in rows)
        self.tick()

    def tick(self) -> None:
        """Cut a shard if its bytes or seconds are full."""
        limits = self._limits()
        old = bool(self._rows) and self._clock() - self._since >= limits.shard_seconds
        if old or self._row_bytes >= limits.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Cut a shard from what is there."""
        if not self._rows:
            return
        seq, rows = self._seq, self._rows
        data = encode_shard(self._header(seq), rows)
        path = self._folder / f"{_UNKEYED}.{self._searcher}.{self._incarnation}.{seq:010d}.arrow"
        _write(path, data)
        self._seq, self._rows, self._row_bytes = seq + 1, [], 0
        with self._guard:
            self._pending.append(_Pending(path, len(data), self._searcher, self._incarnation, seq, len(rows)))
            self._guard.notify_all()
        failpoint("spool.after_cut")

    def upload_once(self) -> bool:
        """Upload the oldest shard; False if there is nothing to do. Raises: StoreUnavailable, AccessDenied."""
        with self._guard:
            if not self._pending:
                return False
            shard = self._pending[0]
        if shard.key is None:
            window = self._window()
            if window == 0:
                return False  # `latest` not seen yet
            shard.key = ShardKey(window, shard.searcher, shard.incarnation, shard.seq)
            shard.path = shard.path.rename(shard.path.with_name(shard.key.path.replace("/", "+")))
        failpoint("upload.before_put")
        try:
            with trace.span("upload", rows=shard.rows):
                self._store.put_once(shard.key.path, shard.path.read_bytes())
        except AlreadyExists as error:
            self._refuse(shard, error)
        else:
            failpoint("upload.after_put")
            shard.path.unlink()
            self.counts.shards += 1
            self.counts.rows += shard.rows
            self.counts.upload_bytes += shard.size
            log.info(SHARD_UPLOADED, key=shard.key.path, rows=shard.rows, bytes=shard.size)
        with self._guard:
            self._pending.remove(shard)
            self._guard.notify_all()
        self.detail = ""
        return True

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until everything cut is uploaded; False if it is not, in time or ever. What is left stays on disk."""
        with self._guard:
            self._guard.wait_for(lambda: not self._pending or self._error is not None, timeout_seconds)
            return not self._pending

    def close(self) -> None:
        """Stop uploading and release the folder."""
        self._stop.set()
        with self._guard:
            self._guard.notify_all()
        if self._thread is not None:
            self._thread.join(2.0)
        for folder, lock in [(self._folder, self._lock_file), *self._inherited]:
            _leave(folder, lock)

    def _run_uploads(self) -> None:
        failures = 0
        try:
            while not self._stop.is_set():
                try:
                    if not self.upload_once():
                        self._await_work()
                    failures = 0
                except (StoreUnavailable, AccessDenied) as error:  # denied: credentials may be about to rotate
                    failures += 1
                    self.counts.unavailable += 1
                    self.detail = str(error)
                    log.warning(STORAGE_RETRIED, task="upload", pending_shards=self.pending_shards, error=str(error))
                    self._stop.wait(self._rng.uniform(0.1, min(30.0, 2.0**failures)))
        except BaseException as error:
            self._error = error
            with self._guard:
                self._guard.notify_all()

    def _await_work(self) -> None:
        with self._guard:
            ready = self._window() > 0  # else a shard may lie there and yet have no window
            self._guard.wait_for(lambda: (ready and bool(self._pending)) or self._stop.is_set(), 0.2)

    def _refuse(self, shard: _Pending, error: AlreadyExists) -> None:
        """Another object has this key: a fault, or files of a restored disk. Kept for a person to look at."""
        shard.path.rename(shard.path.with_name(shard.path.name + _REFUSED))
        self.counts.refused += 1
        log.error(SHARD_SPOOLED, key=shard.key.path if shard.key else None, refused=str(error))

    def _adopt(self, folder: Path) -> None:
        """Take over a dead process's folder: its files, and its lock until they are uploaded."""
        if folder.name.startswith("."):
            return  # another process is making it
        try:
            lock = _hold(folder)
        except OSError:
            return  # its owner lives (for one, we do), or another process is clearing it away
        for partial in folder.glob(f"*{_PARTIAL}"):  # never whole: it would keep the folder for ever
            partial.unlink()
        found = [shard for path in sorted(folder.glob("*.arrow")) if (shard := self._leftover(path)) is not None]
        if not found:
            _leave(folder, lock)
            return
        log.info(SHARD_SPOOLED, adopted=len(found), folder=folder.name)
        self._pending += found
        self._inherited.append((folder, lock))

    def _leftover(self, path: Path) -> _Pending | None:
        """A file as a pending shard; None (and set aside) if it was cut off or belongs to another run."""
        try:
            batch = decode_shard(path.read_bytes(), run_id=self._run)
        except CorruptObject as error:
            path.rename(path.with_name(path.name + _REFUSED))
            log.warning(SHARD_SPOOLED, file=path.name, refused=str(error))
            return None
        key = None if path.name.startswith(f"{_UNKEYED}.") else ShardKey.parse(path.name.replace("+", "/"))
        h = batch.header
        return _Pending(path, path.stat().st_size, h.searcher, h.incarnation, h.seq, len(batch), key)


def _numbers(row: Trajectory) -> int:
    return len(row.prompt_tokens) + len(row.response_tokens) + len(row.sampler_logprobs or ()) + 3 * len(row.spans)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(_PARTIAL)
    temporary.write_bytes(data)
    temporary.replace(path)


def _new_folder(folder: Path) -> int:
    """Make and lock a folder; it bears its name only once it is locked, so that nobody adopts it in between."""
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir(parents=True)
    lock = _hold(hidden)
    hidden.rename(folder)
    return lock


def _hold(folder: Path) -> int:
    """Lock a folder as long as this process lives. Raises: BlockingIOError if another does."""
    file = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    return file


def _leave(folder: Path, lock: int) -> None:
    """Remove a folder if nothing waits in it, and unlock it."""
    if [p.name for p in folder.iterdir()] == [_LOCK]:
        (folder / _LOCK).unlink()
        folder.rmdir()
    os.close(lock)
