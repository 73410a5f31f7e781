"""The trainer process: configuration, signals, HTTP, exit code."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from tba import last_words, telemetry, trace
from tba.contracts.errors import UserError
from tba.contracts.history import Progress
from tba.contracts.runfile import read_run_file
from tba.interpreter import favour_the_loop
from tba.live import LiveSettings
from tba.log import RUN_FINISHED, SIGNAL_RECEIVED, configure, log
from tba.relocation import following
from tba.run_store import open_run_store
from tba.stop import StopFlag, stop_signals
from tba.store import ObjectStore
from tba.trainer.colocated import Colocated, command
from tba.trainer.loop import Terminated, Trainer
from tba.trainer.node import Node
from tba.trainer.nodelink import Hello
from tba.trainer.nodes import Nodes
from tba.trainer.progress import Tracker
from tba.trainer.rank import Bucket, serve
from tba.trainer.rankprocesses import device_of, join_as_child, lacking_gpus, own_rank, torchrun_size
from tba.trainer.ranks import Ranks, join
from tba.trainer.startup import AlreadyComplete, prepare
from tba.trainer.team import Team

CRASH_EXIT = 1
TERMINATED_EXIT = 143
STEP_BUDGET_SECONDS = 900.0
"""Liveness: a step or a checkpoint capture may take so long."""
START_BUDGET_SECONDS = 3600.0
"""Liveness: downloading a model, or reading a checkpoint and its buffer's shards, may take so long."""
DEFAULT_GRACE_SECONDS = 600.0
DEFAULT_RENDEZVOUS_SECONDS = 1800.0
"""Nodes wait so long for each other: one pulls the image while another has it."""
TOKEN = "TBA_RENDEZVOUS_TOKEN"  # noqa: S105 - the name of a variable
"""What only the nodes of one trainer know."""


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
    """Processes of this node that train together, each on a GPU of its own."""
    nodes: int = 1
    """Nodes whose ranks train together."""
    node_rank: int = 0
    """Which of them this is; rank 0, the trainer, is on node 0."""
    rendezvous: str = ""
    """HOST:PORT where node 0 listens."""
    rendezvous_seconds: float = DEFAULT_RENDEZVOUS_SECONDS


def run_trainer(options: TrainerOptions) -> int:
    """Train until the run is complete; returns the exit code 0 or 143.

    Another node than rank 0's returns what `Node.run` does.
    Raises: UserError (64), StoreUnavailable (2), Fenced (3), LeftAlone (143); anything else is a crash (1).
    """
    favour_the_loop()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    run = read_run_file(options.config_dir)
    if rank := own_rank(os.environ):
        configure(role=f"trainer-rank-{rank}", run=run.name, file=options.log_file)
        with ExitStack() as stack:
            serve(join_as_child(), lambda bucket: stack.enter_context(_bucket(options.config_dir, bucket)))
        return 0
    if options.node_rank:
        configure(role=f"trainer-node-{options.node_rank}", run=run.name, file=options.log_file)
        return _serve_node(options)
    live = LiveSettings(options.config_dir)
    configure(role="trainer", run=run.name, file=options.log_file)
    heartbeat = telemetry.Heartbeat(STEP_BUDGET_SECONDS)
    tracker = Tracker.of(run.config.objective.total_steps, os.environ)
    last_words.report_progress(tracker.progress)
    with (
        stop_signals() as stop,
        trace.recording("trainer"),
        _http(
            options.port,
            healthy=heartbeat.alive,
            ready=lambda: (tracker.state != "Starting", tracker.state),
            progress=tracker.progress,
            page=lambda: _page(tracker),
        ),
    ):
        try:
            with _ranks(options, stop, heartbeat, tracker) as ranks:
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
def _bucket(config_dir: Path, bucket: Bucket) -> Iterator[ObjectStore]:
    """As another rank: by the same settings as rank 0, also when they change. Raises: UserError."""
    live = LiveSettings(config_dir)
    store = open_run_store(live().storage, bucket.uri)
    with following(store, lambda: live().storage, run_id=lambda: bucket.run_id):
        yield store


@contextmanager
def _ranks(
    options: TrainerOptions, stop: StopFlag, heartbeat: telemetry.Heartbeat, tracker: Tracker
) -> Iterator[Ranks | None]:
    """This process among the others that train with it; None where it trains alone."""
    size = torchrun_size(os.environ)
    if size > 1:
        ranks = join(0, size, device_of(0))
        try:
            yield ranks
        except (AlreadyComplete, Terminated):
            ranks.close()
            raise
        ranks.close()  # after an error torchrun ends the others
        return
    if options.ranks == options.nodes == 1:
        yield None
        return
    nodes, team = _nodes(options), None
    code, in_order = CRASH_EXIT, False
    try:
        if nodes is not None:
            tracker.detail = "waits for the other nodes of trainer.nodes"
            with heartbeat.allow(tracker.detail, options.rendezvous_seconds + STEP_BUDGET_SECONDS):
                if not nodes.gather(seconds=options.rendezvous_seconds, stopping=stop.is_set):
                    raise Terminated
            tracker.detail = ""
        team = Team(options.ranks, _rank_command(options), on_loss=_end_at_once, nodes=nodes)
        yield team.ranks
        code, in_order = 0, True
    except (AlreadyComplete, Terminated) as end:
        code, in_order = TERMINATED_EXIT if isinstance(end, Terminated) else 0, True
        raise
    except Exception as error:
        code = getattr(error, "exit_code", CRASH_EXIT)
        raise
    finally:
        if team is not None:
            team.close(code=code, in_order=in_order)
        elif nodes is not None:
            nodes.close(code)


def _nodes(options: TrainerOptions) -> Nodes | None:
    if options.nodes == 1:
        return None
    return Nodes(
        options.nodes,
        options.ranks,
        port=_rendezvous(options)[1],
        token=_token(),
        # As if this process had been asked: there is one way out, with a checkpoint.
        on_leave=lambda _node: os.kill(os.getpid(), signal.SIGTERM),
        on_loss=_end_at_once,
    )


def _serve_node(options: TrainerOptions) -> int:
    """As another node than rank 0's."""
    if options.node_rank >= options.nodes:
        raise UserError(f"--node-rank must be < --nodes, got {options.node_rank} of {options.nodes}: lower it")
    hello = Hello(options.node_rank, options.nodes, options.ranks, refusal=lacking_gpus(options.ranks))
    with stop_signals() as stop:
        node = Node(hello, _rendezvous(options), _token(), _rank_command(options), stopping=stop.is_set)
        healthy = lambda: (True, node.state)  # noqa: E731 - what it waits for is bounded, and rank 0 is watched
        with _http(options.port, healthy=healthy, ready=lambda: (node.trains, node.state)):
            return node.run(join_seconds=options.rendezvous_seconds)


def _rendezvous(options: TrainerOptions) -> tuple[str, int]:
    """Host and port of rank 0's node. Raises: UserError."""
    host, _, port = options.rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(
            f"--rendezvous must be HOST:PORT of node 0 with --nodes above 1, got {options.rendezvous!r}: "
            "name an address that the other nodes reach"
        )
    return host.strip("[]"), int(port)


def _token() -> str:
    token = os.environ.get(TOKEN, "")
    if not token:
        raise UserError(f"{TOKEN} must be set with --nodes above 1, got nothing: give all nodes the same random text")
    return token


def _rank_command(options: TrainerOptions) -> list[str]:
    """What starts another rank on this host."""
    argv = [sys.executable, "-m", "tba", "trainer", "--config", str(options.config_dir)]
    return argv + (["--threads", str(options.threads)] if options.threads is not None else [])


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
def _http(
    port: int | None,
    *,
    healthy: telemetry.Probe,
    ready: telemetry.Probe,
    progress: Callable[[], Progress] | None = None,
    page: Callable[[], str] | None = None,
) -> Iterator[None]:
    if port is None:
        yield
        return
    server = telemetry.serve(port, healthy=healthy, ready=ready, progress=progress, page=page)
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
