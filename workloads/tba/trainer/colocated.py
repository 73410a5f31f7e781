"""A searcher inside the trainer's pod: a child process that generates while the trainer is starved, and only then.

```
 tick: start, watch, restart ─► `tba searcher` ── shards ──► bucket ──► ingest, as of any searcher
 starved ───► wake ───────────► its turn (tba.gate)
 rows wait ─► sleep: wait until nothing of it runs, then train ── it does not answer: killed, and started again
```
It dies with this process and never ends it: what goes wrong is told, and after some ends in a row it stays away.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from tba.contracts.config import ColocatedSearcher
from tba.contracts.errors import StoreUnavailable
from tba.gate import PASS_SECONDS, Gatekeeper
from tba.log import COLOCATED_ENDED, COLOCATED_STARTED, log

NAME = "trainer-colocated"
LOG = "TBA_COLOCATED_LOG"
"""Environment variable: the file for its output; unset: with the trainer's."""
GATE = "TBA_GATE_FD"
SLEEP_SECONDS = 60.0
"""A searcher in the middle of a step, or of a swap of weights, must say within it that it sleeps."""
START_SECONDS = 900.0
"""The same for one that starts its engine. vLLM measures how much memory is free then: nobody may change that."""
MAX_FAILURES = 6
"""Ends in a row, each soon after the start: then it is not started again."""
GRACE_SECONDS = 5.0
"""From SIGTERM until it is killed: what is not uploaded then stays in its spool."""
_STEADY_SECONDS = 60.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0
_LOOK_SECONDS = 0.1
_OWN = ("TBA_PORT", "TBA_PORT_FILE", "TBA_TERMINATION_PATH", "TBA_GRACE_SECONDS", "TBA_FAILPOINTS", GATE, LOG)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TOKENS = ("HF_TOKEN", "TBA_PROMPTS_HF_TOKEN", "TBA_EVALUATION_HF_TOKEN", "TBA_RENDEZVOUS_TOKEN")
_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
          "MASTER_PORT")  # fmt: skip


def command(*, config_dir: Path, storage: str, threads: int | None) -> list[str]:
    """What starts the searcher, for the run of this trainer."""
    arguments = ["--config", str(config_dir), "--storage", storage, "--name", NAME, "--exit-when-done"]
    arguments += ["--grace-seconds", str(GRACE_SECONDS)]
    arguments += ["--threads", str(threads)] if threads is not None else []
    return [sys.executable, "-m", "tba", "searcher", *arguments]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The searcher's, from this process's `own`: memory that trains is allocated in another way than an engine's."""
    return {name: value for name, value in child_environment(own).items() if name not in _ALLOCATOR}


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Of any child of a trainer: without what is the trainer's alone, such as tokens and its port."""
    left_out = {*_OWN, *_TOKENS, *_RANKS}
    return {name: value for name, value in own.items() if name not in left_out and not name.startswith("TORCHELASTIC")}


def nobody() -> "Colocated":
    """Of a trainer that hosts none."""
    return Colocated([], ColocatedSearcher)


class Colocated:
    """For the trainer's main thread, which must outlive the searcher: the kernel ends it with that thread."""

    def __init__(
        self,
        argv: list[str],
        settings: Callable[[], ColocatedSearcher],
        *,
        make_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_room`: give device memory that this process holds and does not use back."""
        self._argv = argv
        self._settings = settings
        self._make_room = make_room
        self._clock = clock
        self._running: ColocatedSearcher | None = None  # the settings of the process there is
        self._tried: ColocatedSearcher | None = None  # those of the last start, for which ends are counted
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: Gatekeeper | None = None
        self._engine_started = False
        self._wanted = self._stopped = False
        self._ended = False  # by itself and in order: the run has ended
        self._started_at = 0.0
        self._start_at: float | None = 0.0  # None: never again
        self._waits = self._failures = 0
        self._tell: Callable[[str, str], None] = lambda _event, _detail: None
        self._beat: Callable[[], None] = lambda: None
        self._stopping: Callable[[], bool] = lambda: False
        self.trouble = ""
        """Why there is none, in words."""

    def attach(
        self, *, tell: Callable[[str, str], None], beat: Callable[[], None], stopping: Callable[[], bool]
    ) -> None:
        """The trainer's side. `tell` takes an event of the run and its detail; `beat` and `stopping` are for waits."""
        self._tell, self._beat, self._stopping = tell, beat, stopping

    @property
    def pid(self) -> int | None:
        """Of the searcher, while there is one."""
        return self._process.pid if self._process is not None else None

    def tick(self) -> None:
        """Look after it once: start, restart, or stop it as the settings say, and wake it if it should be awake."""
        self._watch()
        settings = self._settings()
        enabled = settings.enabled is True and not self._stopped
        if self._process is not None and (not enabled or settings != self._running):
            self.close()
        if settings != self._tried and not self._ended:  # others may do where these did not
            self._tried, self._start_at, self._failures, self.trouble = settings, 0.0, 0, ""
        if enabled and self._process is None and self._start_at is not None and self._clock() >= self._start_at:
            self._start(settings)
        if self._wanted:
            self.wake()

    def wake(self) -> None:
        """The trainer is starved: let the searcher generate as soon as it can, until `sleep`."""
        fresh, self._wanted = not self._wanted, True
        if self._keeper is None or self._running is None:
            return
        self._keeper.read()
        if not self._engine_started:
            self._engine_started = self._keeper.state == "awake"
        if not self._engine_started or (fresh and self._running.free_memory):
            self._make_room()
        self._keeper.wake()

    def sleep(self) -> None:
        """Return when the searcher does nothing on the device, and holds no memory there if it is to free it.

        One that does not answer in time is killed; if this trainer is to stop, it is asked to end instead.
        """
        self._wanted = False
        keeper, began = self._keeper, self._clock()
        if keeper is None:
            return
        keeper.take_turn()
        while self._process is not None and not keeper.alone():
            self._beat()
            if self._stopping():
                self.stop()
                self.close()
                return
            patience = START_SECONDS if keeper.state == "starting" else SLEEP_SECONDS
            if self._clock() - began > patience:
                log.error(COLOCATED_ENDED, reason=f"killed: not asleep after {self._clock() - began:.0f} s")
                self._process.kill()
                self._process.wait()
            keeper.wait(_LOOK_SECONDS)
            self._watch()

    def poll_seconds(self, usual: float) -> float:
        """How often to look for rows. For any thread."""
        return min(usual, PASS_SECONDS) if self._wanted and self._process is not None else usual

    def stop(self) -> None:
        """Ask it to end, for good; `close` waits for that."""
        self._stopped = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it, within its grace or by force."""
        process, keeper = self._process, self._keeper
        self._process = self._keeper = self._running = None
        if process is None or keeper is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        keeper.close()

    def _start(self, settings: ColocatedSearcher) -> None:
        keeper = Gatekeeper()
        try:
            self._process = self._launch(keeper.fd)
        except OSError as error:  # no memory or no process slots for now
            keeper.close()
            self._failed(str(error), counts=True)
            return
        keeper.passed()
        self._keeper, self._running, self._engine_started = keeper, settings, False
        self._started_at = self._clock()
        log.info(COLOCATED_STARTED, pid=self._process.pid)

    def _launch(self, fd: int) -> "subprocess.Popen[bytes]":
        with ExitStack() as stack:
            log_file = os.environ.get(LOG)
            output = stack.enter_context(Path(log_file).open("ab")) if log_file else None
            return subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[fd],
                start_new_session=True,  # Ctrl-C reaches only us: we stop it in order
                env={**environment(os.environ), GATE: str(fd)},
            )

    def _watch(self) -> None:
        """Notice its end and decide about the next start."""
        if self._process is None or self._keeper is None or self._process.poll() is None:
            return
        code = self._process.returncode
        self._keeper.close()
        self._process = self._keeper = self._running = None
        if code == 0 or self._stopped:  # the run has ended, or this trainer is about to
            self._start_at, self._ended = None, True
            return
        if self._clock() - self._started_at >= _STEADY_SECONDS:
            self._waits = self._failures = 0
        # Storage comes back, and the trainer itself waits for it.
        told = f"code {code}" if code >= 0 else signal.Signals(-code).name
        self._failed(told, counts=code != StoreUnavailable.exit_code)

    def _failed(self, told: str, *, counts: bool) -> None:
        self._failures += counts
        if self._failures >= MAX_FAILURES:
            self._start_at = None
            self.trouble = (
                f"the colocated searcher ended {self._failures} times in a row, last with {told}: see its log"
            )
        else:
            self._start_at = self._clock() + min(_FIRST_WAIT_SECONDS * 2**self._waits, _LONGEST_WAIT_SECONDS)
            self._waits += 1
        detail = self.trouble or f"{told}; it starts again"
        log.warning(COLOCATED_ENDED, reason=detail)
        self._tell("colocated_searcher_ended", detail)
