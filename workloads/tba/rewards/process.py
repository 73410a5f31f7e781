"""One reward process as the parent sees it: start, talk, limit, kill with everything it started."""

import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tba.rewards import RewardSource
from tba.rewards.frames import FrameReader, frame
from tba.rewards.orphans import collect

_MARK = "TBA_REWARD_PROCESS"  # environment variable that names every process a reward starts, daemons included
_READ_BYTES = 1 << 16
_READS_AT_ONCE = 16
_TAIL_BYTES = 4096
_SWEEPS = 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# `-m tba.rewards.child`, but the package is found even where this program got it from a path set at run time.
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from tba.rewards.child import main; main()"


class RewardProcess:
    """A child running `tba.rewards.child`, in its own session and so its own process group. Not thread-safe.

    Must be started by a thread that outlives it: the kernel kills the child when that thread ends.
    """

    def __init__(self, source: RewardSource, memory_bytes: int) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.output, their_output = os.pipe()
        os.set_blocking(self.output, False)
        nonce = secrets.token_hex(16)
        self._mark = f"{_MARK}={nonce}".encode()
        self.closed = False  # the child has closed its end: it has ended or is about to
        self.output_closed = False
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._tail = b""
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _PROGRAM, _PACKAGE_ROOT, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, _MARK: nonce},
            )
        except OSError:
            self._close_files()
            raise
        finally:
            theirs.close()
            os.close(their_output)
        self.pid = self._popen.pid
        self._set_limit(resource.RLIMIT_CORE, 0)
        self.set_memory(memory_bytes)
        self.send(json.dumps(asdict(source)).encode())

    def set_memory(self, memory_bytes: int) -> None:
        """Limit the child's address space from now on; what it already has is kept."""
        self._set_limit(resource.RLIMIT_AS, memory_bytes)

    def send(self, payload: bytes) -> None:
        """Queue one message; `flush` writes it."""
        self._unsent += frame(payload)

    def flush(self) -> bool:
        """Write what the socket takes. Returns whether everything is written."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        return not self._unsent

    def receive(self) -> list[Any]:
        """Return the messages that have arrived, without waiting.

        Raises:
            ValueError: the reward wrote its own bytes to our socket.
        """
        payloads: list[bytes] = []
        try:
            for _ in range(_READS_AT_ONCE):
                data = self.socket.recv(_READ_BYTES)
                if not data:
                    self.closed = True
                    break
                payloads += self._reader.feed(data)
        except BlockingIOError:
            pass
        except ConnectionResetError:  # it ended with our messages unread
            self.closed = True
        return [json.loads(payload) for payload in payloads]

    def drain_output(self) -> None:
        """Take what was printed, so that printing never blocks; only the last bytes are kept."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_AT_ONCE):
                data = os.read(self.output, _READ_BYTES)
                if not data:
                    self.output_closed = True
                    break
                self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]

    def ended(self) -> bool:
        """Whether the process has ended; it is not reaped, so its id stays ours."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def describe_end(self) -> str:
        """Say how an ended process ended and what it printed last."""
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.drain_output()
        if info is None:
            how = "the reward process is still running"
        elif info.si_code == os.CLD_EXITED:
            how = f"the reward process exited with status {info.si_status}"
        else:
            how = f"the reward process was ended by signal {info.si_status} ({signal.strsignal(info.si_status)})"
        printed = self._tail.decode(errors="replace").strip()
        return f"{how}; last output: {printed[-300:]!r}" if printed else how

    def kill_group(self) -> None:
        """Kill the process and its group; the exit status of one that is already ending stays as it is."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process, its group, and whatever it started that left the group; then `reap`."""
        self.kill_group()
        strays: set[int] = set()
        for _ in range(_SWEEPS):
            marked = _processes_marked(self._mark)
            if not marked:
                break
            for pid in marked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            strays.update(marked)
        for pid in strays - {self.pid}:  # dead by now; ours to collect if we are process 1
            collect(pid)
        self._close_files()

    def reap(self, timeout_seconds: float = 0.0) -> bool:
        """Collect a killed process. Returns whether it is gone."""
        try:
            self._popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _set_limit(self, which: int, value: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.pid, which)
            # Only the soft limit: a live raise must not need privileges.
            soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(self.pid, which, (soft, hard))

    def _close_files(self) -> None:
        self.socket.close()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


def _processes_marked(mark: bytes) -> list[int]:
    """Find live processes whose environment at their start held `mark`; a fork keeps its parent's."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        # Another user's, or gone meanwhile. A zombie's environment reads as empty.
        with contextlib.suppress(OSError):
            if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found
