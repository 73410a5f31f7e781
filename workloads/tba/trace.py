"""A timeline of one process in Chrome's Trace Event Format, for Perfetto or chrome://tracing; asked for by TBA_TRACE.

One file a process, one event a line, written as it goes. The format lets the closing bracket be missing, so what a
killed process leaves can be opened up to its last flush. Not asked for, a span costs a look at one variable.
Source: "Trace Event Format" of the Trace Viewer: complete events (X), nestable asynchronous ones (b, e), metadata (M).
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tba.contracts.errors import UserError
from tba.log import TRACE_ENDED, log

DIRECTORY = "TBA_TRACE"
"""Environment variable: the directory for the files; empty or unset: no trace."""
SUFFIX = ".trace.json"
MAX_BYTES = 256 * 2**20
"""Of one file; a last event says that the rest is missing."""
_FLUSH_BYTES = 1 << 16
_FLUSH_NS = 500_000_000
_NOTHING = nullcontext()
_LEFT_OUT = "trace ends here: file is full"


class Trace:
    """One file. Thread-safe: each thread, by its name, has a track of its own."""

    def __init__(
        self,
        path: Path,
        *,
        process: str,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], int] = time.perf_counter_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        """`process`: its name in the viewer. Times are Unix time, so that files of several processes line up.

        Raises: OSError if the file cannot be made.
        """
        self._file = path.open("xb", buffering=0)
        self._clock = clock
        self._offset = wall() - clock()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._tracks: dict[str, int] = {}
        self._lines: list[str] = []
        self._waiting = self._written = 0
        self._flushed_at = clock()
        self._open = True
        self._separator = "[\n"
        self._metadata("process_name", 0, process)
        self.flush()

    def now(self) -> int:
        """Of this trace's clock, nanoseconds."""
        return self._clock()

    def complete(self, name: str, started: int, ended: int, arguments: dict[str, Any] | None = None) -> None:
        """What this thread did from `started` to `ended` (`now`)."""
        self._add(name, "X", started, f',"dur":{(ended - started) / 1000:.3f}', arguments)

    def asynchronous(self, name: str, phase: str, identity: int) -> None:
        """Something that begins (`phase` b) here and ends (e) elsewhere, beside others of its name."""
        self._add(name, phase, self._clock(), f',"cat":"{name}","id":{identity}', None)

    def flush(self) -> None:
        """Hand what is known to the operating system."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write what is left and the bracket that ends the file."""
        with self._lock:
            self._flush(end="\n]\n")
            self._stop()

    def abandon(self) -> None:
        """A forked child leaves its parent's file alone."""
        self._open = False

    def _add(self, name: str, phase: str, at: int, more: str, arguments: dict[str, Any] | None) -> None:
        thread = threading.current_thread().name
        line = f'{{"name":{_quoted(name)},"ph":"{phase}","ts":{(at + self._offset) / 1000:.3f},"pid":{self._pid}{more}'
        if arguments:
            line += f',"args":{json.dumps(arguments)}'
        with self._lock:
            if not self._open:
                return
            track = self._tracks.get(thread)
            if track is None:
                track = self._tracks[thread] = len(self._tracks) + 1
                self._metadata("thread_name", track, thread)
            self._append(f'{line},"tid":{track}}}')
            if self._written + self._waiting >= self._max_bytes:
                self._append(f'{{"name":"{_LEFT_OUT}","ph":"i","s":"g","ts":{(at + self._offset) / 1000:.3f},'
                             f'"pid":{self._pid},"tid":{track}}}')  # fmt: skip
                self._flush(end="\n]\n")
                self._stop()
                log.warning(TRACE_ENDED, reason=f"{self._max_bytes} bytes are the most of one file")
            elif self._waiting >= _FLUSH_BYTES or self._clock() - self._flushed_at >= _FLUSH_NS:
                self._flush()

    def _metadata(self, kind: str, track: int, name: str) -> None:
        label = json.dumps(name)
        self._append(f'{{"name":"{kind}","ph":"M","pid":{self._pid},"tid":{track},"args":{{"name":{label}}}}}')

    def _append(self, line: str) -> None:
        text = self._separator + line
        self._separator = ",\n"
        self._lines.append(text)
        self._waiting += len(text)

    def _flush(self, end: str = "") -> None:
        if not self._open:
            return
        data = ("".join(self._lines) + end).encode()
        self._lines.clear()
        self._written += self._waiting
        self._waiting = 0
        self._flushed_at = self._clock()
        try:
            if self._file.write(data) != len(data):
                raise OSError("the disk is full")
        except OSError as error:  # a full disk ends the trace, not the run
            self._stop()
            log.warning(TRACE_ENDED, reason=str(error))

    def _stop(self) -> None:
        self._open = False
        with suppress(OSError):
            self._file.close()


_quoted = lru_cache(json.dumps)
"""Names are few."""


class _Span:
    __slots__ = ("_arguments", "_name", "_started", "_trace")

    def __init__(self, trace: Trace, name: str, arguments: dict[str, Any]) -> None:
        self._trace, self._name, self._arguments = trace, name, arguments

    def __enter__(self) -> None:
        self._started = self._trace.now()

    def __exit__(self, *_: object) -> None:
        self._trace.complete(self._name, self._started, self._trace.now(), self._arguments)


_active: Trace | None = None


def span(name: str, **arguments: Any) -> AbstractContextManager[None]:
    """What is done inside becomes an event of this thread's track."""
    active = _active
    return _NOTHING if active is None else _Span(active, name, arguments)


def began(name: str, identity: int) -> None:
    """Something begins whose end another thread may see: `ended` with the same name and number."""
    if _active is not None:
        _active.asynchronous(name, "b", identity)


def ended(name: str, identity: int) -> None:
    """The end of what `began`."""
    if _active is not None:
        _active.asynchronous(name, "e", identity)


def lay_out(seconds: dict[str, float]) -> None:
    """Parts of what has just ended, known by their sums alone: one behind the other, the last ending now."""
    active = _active
    if active is None:
        return
    at = active.now() - round(sum(seconds.values()) * 1e9)
    for name, length in seconds.items():
        end = at + round(length * 1e9)
        active.complete(f"{name} (sum)", at, end)
        at = end


@contextmanager
def recording(role: str, name: str = "") -> Iterator[None]:
    """Record this process if TBA_TRACE names a directory, into {name}.{start}.{pid}.trace.json of it.

    Raises: UserError if no file can be made there.
    """
    global _active
    folder = os.environ.get(DIRECTORY)
    if not folder:
        yield
        return
    title = name if name.startswith(role) else f"{role} {name}".strip()
    start = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = Path(folder) / f"{title.replace(' ', '-')}.{start}.{os.getpid()}{SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = Trace(path, process=title)
    except OSError as error:
        raise UserError(f"{DIRECTORY} must name a directory that can be written, got {error}: correct it") from error
    _active = trace
    try:
        yield
    finally:
        _active = None
        trace.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of one file, whole or cut off anywhere by the end of its process."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line.strip().rstrip(","))
        except ValueError:
            continue  # a bracket, or the line that was being written
        if isinstance(event, dict):
            events.append(event)
    return events


def merge(paths: list[Path]) -> list[dict[str, Any]]:
    """Events of several processes; each file gets a process number of its own (in pods every process has the same)."""
    return [
        event | {"pid": number} for number, path in enumerate(sorted(paths), start=1) for event in read_events(path)
    ]


def _forked() -> None:
    global _active
    if _active is not None:
        _active.abandon()
        _active = None


os.register_at_fork(after_in_child=_forked)
