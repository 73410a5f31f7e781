"""The trainer process: configuration, signals, HTTP, exit code."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from tba import last_words, telemetry, trace
from tba.contracts.errors import UserError
from tba.contracts.runfile import read_run_file
from tba.interpreter import favour_the_loop
from tba.live import LiveSettings
from tba.log import RUN_FINISHED, SIGNAL_RECEIVED, configure, log
from tba.relocation import following
from tba.stop import stop_signals
from tba.trainer.colocated import Colocated, command
from tba.trainer.loop import Terminated, Trainer
from tba.trainer.progress import Tracker
from tba.trainer.rank import serve
from tba.trainer.rankprocesses import RankProcesses, device_of, join_as_child, own_rank, torchrun_size
from tba.trainer.ranks import Ranks, join
from tba.trainer.startup import AlreadyComplete, prepare

TERMINATED_EXIT = 143
STEP_BUDGET_SECONDS = 900.0
"""Liveness: a step or a checkpoint capture may take so long."""
START_BUDGET_SECONDS = 3600.0
"""Liveness: downloading a model, or reading a checkpoint and its buffer's shards, may take so long."""
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
    ranks: int = 1
    """Processes that train together, each on a GPU of its own."""


def run_trainer(options: TrainerOptions) -> int:
    """Train until the run is complete; returns the exit code 0 or 143.

    Raises: UserError (64), StoreUnavailable (2), Fenced (3); anything else is a crash (1).
    """
    favour_the_loop()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    run = read_run_file(options.config_dir)
    if rank := own_rank(os.environ):
        configure(role=f"trainer-rank-{rank}", run=run.name, file=options.log_file)
        serve(join_as_child())
        return 0
    live = LiveSettings(options.config_dir)
    configure(role="trainer", run=run.name, file=options.log_file)
    heartbeat = telemetry.Heartbeat(STEP_BUDGET_SECONDS)
    tracker = Tracker(run.config.objective.total_steps, os.environ.get("TBA_POD_UID"))
    last_words.report_progress(tracker.progress)
    with (
        stop_signals() as stop,
        trace.recording("trainer"),
        _http(options.port, heartbeat, tracker),
        _ranks(options) as ranks,
    ):
        try:
            with heartbeat.allow("starting", START_BUDGET_SECONDS):
                uri = options.storage or live().storage.uri
                ready = prepare(run, live(), uri, tracker.alarms.weather, ranks=ranks)
            if stop.is_set():  # nothing has been trained yet: nothing to save
                raise Terminated
            trainer = Trainer(
                ready,
                live,
                stop=stop,
                heartbeat=heartbeat,
                grace_seconds=options.grace_seconds,
                tracker=tracker,
                colocated=_colocated(options, live),
            )
            with following(ready.store, lambda: live().storage, run_id=lambda: ready.record.run_id):
                trainer.run()
        except AlreadyComplete as done:
            tracker.found_complete(done.run_id, done.latest)
            log.info(RUN_FINISHED, detail=str(done))
        except UserError as error:
            tracker.failed(str(error))
            raise
        except Terminated:
            log.info(SIGNAL_RECEIVED, detail="asked to end: stopped between two steps")
            return TERMINATED_EXIT
    return 0


@contextmanager
def _ranks(options: TrainerOptions) -> Iterator[Ranks | None]:
    """This process among the others that train with it; None where it trains alone."""
    size = torchrun_size(os.environ)
    if size > 1:
        ranks = join(0, size, device_of(0))
        yield ranks
        ranks.close()  # after an error torchrun ends the others
        return
    if options.ranks == 1:
        yield None
        return
    argv = [sys.executable, "-m", "tba", "trainer", "--config", str(options.config_dir)]
    argv += ["--threads", str(options.threads)] if options.threads is not None else []
    processes = RankProcesses(options.ranks, argv, on_loss=_end_at_once)
    in_order = False
    try:
        yield processes.ranks
        in_order = True
    finally:
        processes.close(in_order=in_order)


def _end_at_once(told: str) -> None:
    """In a thread: the main one may wait for the lost rank for long."""
    last_words.leave(1, told)
    os._exit(1)


def _colocated(options: TrainerOptions, live: LiveSettings) -> Colocated:
    storage = options.storage or live().storage.uri
    return Colocated(
        command(config_dir=options.config_dir, storage=storage, threads=options.threads),
        lambda: live().trainer.colocated_searcher,
        make_room=torch.cuda.empty_cache,  # does nothing where CUDA is not in use
    )


@contextmanager
def _http(port: int | None, heartbeat: telemetry.Heartbeat, tracker: Tracker) -> Iterator[None]:
    if port is None:
        yield
        return
    server = telemetry.serve(
        port,
        healthy=heartbeat.alive,
        ready=lambda: (tracker.state != "Starting", tracker.state),
        progress=tracker.progress,
        page=lambda: _page(tracker),
    )
    port_file = os.environ.get("TBA_PORT_FILE")
    if port_file:
        Path(port_file).write_text(str(server.port))
    try:
        yield
    finally:
        server.close()


def _page(tracker: Tracker) -> str:
    progress = json.loads(tracker.progress().to_json())
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in progress.items())
    return (
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=5><title>TBA trainer</title>"
        "<style>body{font:14px system-ui;margin:2em}th{text-align:left;padding-right:2em}</style>"
        f"<h1>TBA trainer</h1><table>{rows}</table>"
    )
