"""Start, watch, restart and stop the processes of a run on one machine. No torch, no pydantic.

start -> tick, tick, ... -> trainer ends 0            -> stop searchers -> 0
                         -> trainer ends 3 or 64      -> stop searchers -> that code
                         -> trainer ends otherwise    -> wait, start it again (it resumes from the bucket)
                         -> a searcher ends           -> wait, start it again
request_stop (Ctrl-C)    -> SIGTERM to all, SIGKILL to what outlives its grace
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba.cli.exit import CRASH, INTERRUPTED, MARK, TERMINATED
from tba.contracts.errors import Fenced, StoreUnavailable, UserError
from tba.parent import die_with_parent

_FINAL = (UserError.exit_code, Fenced.exit_code)
_STEADY_SECONDS = 60.0
"""A process that ran for so long starts over with the shortest wait."""
_MAX_LOG_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Program:
    """One process to keep running."""

    name: str
    argv: Sequence[str]
    log: Path
    """Takes standard output and standard error, appended."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of this process's environment."""
    grace_seconds: float = 60.0
    """From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to give up, and how long to wait before a restart."""

    backoff_limit: int = 6
    """Ends of the trainer without a new checkpoint."""
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 30.0


@dataclass(slots=True)
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    """Where the log of this attempt begins, in bytes."""
    started_at: float = 0.0
    start_at: float | None = None
    """When to start again; None: not waiting."""
    failures: int = 0
    """Ends in a row that were soon after the start."""
    restarts: int = 0
    kill_at: float | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Call `start`, then `tick` a few times a second until it returns an exit code."""

    def __init__(
        self,
        trainer: Program,
        searchers: Sequence[Program],
        *,
        policy: RestartPolicy | None = None,
        checkpoint: Callable[[], str | None] = lambda: None,
        notify: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`checkpoint`: names the newest checkpoint, or None; a new name means progress. `notify`: one line of news."""
        self._trainer = _Child(trainer)
        self._searchers = [_Child(s) for s in searchers]
        self._policy = policy or RestartPolicy()
        self._checkpoint = checkpoint
        self._notify = notify
        self._clock = clock
        self._fruitless = 0
        self._newest: str | None = None
        self._code: int | None = None  # decided; what is left is to stop the others
        self._hurried_by: str | None = None  # what asked for the end while it was under way
        self.message: str | None = None
        """Why the run failed, in the words of the process that knows."""

    def start(self) -> None:
        """Start every process."""
        self._newest = self._checkpoint()
        for child in self._all():
            self._launch(child)

    def tick(self) -> int | None:
        """Look after every process once; the exit code when all have ended, else None."""
        if self._code is None:
            self._watch_trainer()
        if self._code is None:
            for child in self._searchers:
                self._watch_searcher(child)
        if self._code is not None:
            return self._wind_down()
        return None

    def request_stop(self, code: int = TERMINATED) -> None:
        """Ask every process to end; again: kill what is left."""
        if self._code is not None:
            self._hurried_by = "Ctrl-C" if code == INTERRUPTED else "SIGTERM"
            for child in self._all():
                child.kill_at = self._clock()
            return
        self._code = code
        self._terminate(self._all())

    def kill(self) -> None:
        """End every process at once. For the way out when something here failed."""
        for child in self._all():
            if child.running and child.process:
                child.process.kill()
            if child.process:
                child.process.wait()

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of what runs now."""
        return {c.program.name: c.process.pid for c in self._all() if c.running and c.process}

    @property
    def restarts(self) -> dict[str, int]:
        """Name -> restarts so far."""
        return {c.program.name: c.restarts for c in self._all()}

    @property
    def stopping(self) -> bool:
        """Whether the end is decided."""
        return self._code is not None

    def _all(self) -> list[_Child]:
        return [self._trainer, *self._searchers]

    def _launch(self, child: _Child) -> None:
        program = child.program
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            child.log_start = log.tell()
            child.process = subprocess.Popen(
                list(program.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **program.env},
                start_new_session=True,  # Ctrl-C reaches only us: we stop them in order
                preexec_fn=die_with_parent,  # so that no process is left behind
            )
        child.started_at, child.start_at = self._clock(), None
        self._notify(f"{program.name} started, pid {child.process.pid}, log {program.log}")

    def _watch_trainer(self) -> None:
        child = self._trainer
        if self._waiting(child) or child.running or child.process is None:
            return
        code = _exit_code(child.process.returncode)
        if code == 0:
            self._finish(0)
        elif code in _FINAL:
            self.message = self._last_words(child)
            self._finish(code)
        else:
            self._restart_trainer(code)

    def _restart_trainer(self, code: int) -> None:
        checkpoint = self._checkpoint()
        if checkpoint != self._newest:
            self._newest, self._fruitless = checkpoint, 0
        # Storage that worked before comes back; storage that never did is more likely a wrong address.
        if code != TERMINATED and (code != StoreUnavailable.exit_code or checkpoint is None):
            self._fruitless += 1
        if self._fruitless > self._policy.backoff_limit:
            self.message = (
                f"the trainer ended {self._fruitless} times without a new checkpoint (backoffLimit "
                f"{self._policy.backoff_limit}), last with code {code}: see {self._trainer.program.log}\n"
                f"{self._last_words(self._trainer)}"
            )
            self._finish(code if code == StoreUnavailable.exit_code else CRASH)
            return
        self._schedule(self._trainer, code)

    def _watch_searcher(self, child: _Child) -> None:
        if self._waiting(child) or child.running or child.process is None:
            return
        code = _exit_code(child.process.returncode)
        if code == UserError.exit_code:
            self.message = self._last_words(child)
            self._finish(code)
        else:
            self._schedule(child, code)

    def _waiting(self, child: _Child) -> bool:
        """Whether the child awaits its restart; starts it when its time has come."""
        if child.start_at is None:
            return False
        if self._clock() >= child.start_at:
            child.restarts += 1
            self._launch(child)
        return True

    def _schedule(self, child: _Child, code: int) -> None:
        steady = self._clock() - child.started_at >= _STEADY_SECONDS
        child.failures = 1 if steady else child.failures + 1
        wait = min(self._policy.first_wait_seconds * 2 ** (child.failures - 1), self._policy.longest_wait_seconds)
        child.start_at = self._clock() + wait
        self._notify(f"{child.program.name} ended with {describe(code)}; starts again in {wait:.0f} s")

    def _finish(self, code: int) -> None:
        self._code = code
        self._terminate(self._all())

    def _terminate(self, children: list[_Child]) -> None:
        for child in children:
            child.start_at = None
            if child.running and child.process:
                child.process.send_signal(signal.SIGTERM)
                # A process that is stopped (SIGSTOP) would sleep through its grace.
                child.process.send_signal(signal.SIGCONT)
                child.kill_at = self._clock() + child.program.grace_seconds

    def _wind_down(self) -> int | None:
        running = [c for c in self._all() if c.running]
        for child in running:
            if child.kill_at is not None and self._clock() >= child.kill_at and child.process:
                why = (
                    f"{self._hurried_by} while it was stopping" if self._hurried_by else "did not end within its grace"
                )
                self._notify(f"{child.program.name} killed: {why}")
                child.process.kill()
                child.kill_at = None
        return None if running else self._code

    def _last_words(self, child: _Child) -> str:
        """What the process said last: its told error if there is one, else its last lines."""
        with child.program.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(child.log_start, size - _MAX_LOG_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        told = [i for i, line in enumerate(lines) if line.startswith(MARK)]
        if told:
            return "\n".join([lines[told[-1]].removeprefix(MARK), *lines[told[-1] + 1 :]])
        return "\n".join(lines[-15:])


def describe(code: int) -> str:
    """An exit code in words."""
    known = {0: "success", 1: "a crash", 2: "storage unavailable", TERMINATED: "SIGTERM"}
    if code in known:
        return f"code {code} ({known[code]})"
    if code > 128 and code - 128 in set(signal.Signals):
        return f"code {code} ({signal.Signals(code - 128).name})"
    return f"code {code}"


def _exit_code(returncode: int) -> int:
    """As a shell has it: 128 + n for signal n."""
    return 128 - returncode if returncode < 0 else returncode
