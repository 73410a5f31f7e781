"""The trainer process: configuration, signals, HTTP, exit code."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import FrameType

import torch

from tba import telemetry
from tba.contracts.config import LiveConfig
from tba.contracts.errors import UserError
from tba.contracts.runfile import LIVE_FILE, read_live_config, read_run_file
from tba.log import CONFIG_REFUSED, CONFIG_RELOADED, RUN_FINISHED, SIGNAL_RECEIVED, configure, log
from tba.trainer.loop import Terminated, Trainer
from tba.trainer.startup import AlreadyComplete, prepare

TERMINATED_EXIT = 143
RELOAD_SECONDS = 2.0
STEP_BUDGET_SECONDS = 900.0
"""Liveness: a step, a checkpoint capture or a start-up phase may take so long."""
DEFAULT_GRACE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """What the command line or the pod says."""

    config_dir: Path
    storage: str | None = None
    """null: the job's own storage.uri."""
    port: int | None = None
    """null: no HTTP."""
    threads: int | None = None
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    log_file: Path | None = None


class LiveFile:
    """The newest readable `live.json`; a broken one is refused and the old one kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / LIVE_FILE
        self._stamp = self._path.stat().st_mtime_ns if self._path.exists() else 0
        self.current: LiveConfig = read_live_config(directory)

    def watch(self, stop: threading.Event) -> None:
        """Re-read on change until `stop`."""
        while not stop.wait(RELOAD_SECONDS):
            self.reload()

    def reload(self) -> None:
        """Re-read if the file changed."""
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self.current = read_live_config(self._directory)
            log.info(CONFIG_RELOADED, path=str(self._path))
        except (OSError, UserError) as error:
            log.error(CONFIG_REFUSED, path=str(self._path), error=str(error))


def run_trainer(options: TrainerOptions) -> int:
    """Train until the run is complete; returns the exit code 0 or 143.

    Raises: UserError (64), StoreUnavailable (2), Fenced (3); anything else is a crash (1).
    """
    run = read_run_file(options.config_dir)
    live = LiveFile(options.config_dir)
    configure(role="trainer", run=run.name, file=options.log_file)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    stop, ended = threading.Event(), threading.Event()
    heartbeat = telemetry.Heartbeat(STEP_BUDGET_SECONDS)
    threading.Thread(target=live.watch, args=(ended,), name="live", daemon=True).start()
    with _signals(stop):
        try:
            ready = prepare(run, live.current, options.storage or live.current.storage.uri)
            trainer = Trainer(
                ready, lambda: live.current, stop=stop, heartbeat=heartbeat, grace_seconds=options.grace_seconds
            )
            with _http(options.port, heartbeat, trainer):
                trainer.run()
        except AlreadyComplete as done:
            log.info(RUN_FINISHED, detail=str(done))
        except Terminated:
            return TERMINATED_EXIT
        finally:
            ended.set()
    return 0


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop between two steps."""

    def handle(number: int, _frame: FrameType | None) -> None:
        log.info(SIGNAL_RECEIVED, signal=signal.Signals(number).name)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _http(port: int | None, heartbeat: telemetry.Heartbeat, trainer: Trainer) -> Iterator[None]:
    if port is None:
        yield
        return
    tracker = trainer.tracker
    server = telemetry.serve(
        port,
        healthy=heartbeat.alive,
        ready=lambda: (tracker.state != "Starting", tracker.state),
        progress=tracker.progress,
        page=lambda: _page(trainer),
    )
    port_file = os.environ.get("TBA_PORT_FILE")
    if port_file:
        Path(port_file).write_text(str(server.port))
    try:
        yield
    finally:
        server.close()


def _page(trainer: Trainer) -> str:
    progress = json.loads(trainer.tracker.progress().to_json())
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in progress.items())
    return (
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=5><title>TBA trainer</title>"
        "<style>body{font:14px system-ui;margin:2em}th{text-align:left;padding-right:2em}</style>"
        f"<h1>TBA trainer</h1><table>{rows}</table>"
    )
