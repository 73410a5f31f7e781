"""The searcher process: configuration, signals, HTTP, and the parts of the loop. Needs the bucket and nothing else."""

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba import telemetry, trace
from tba.contracts.config import ColocatedSearcher, Engine, LiveConfig, Model, Storage
from tba.contracts.errors import UserError
from tba.contracts.keys import RUN, is_searcher_name, new_nonce
from tba.contracts.records import RunRecord, ShardHeader
from tba.contracts.runfile import RunFile, read_run_file
from tba.flops import peak_flops
from tba.gate import PASS_SECONDS, Gate, die_with_trainer
from tba.gpus import gpu_model
from tba.interpreter import favour_the_loop
from tba.live import LiveSettings
from tba.log import DATA_AWAITED, PROCESS_STARTED, SIGNAL_RECEIVED, bind, configure, log
from tba.prompts import PromptWalk, load_prompt_set
from tba.relocation import following
from tba.rewards.sandbox import RewardPool
from tba.rewards.stored import get_reward_code
from tba.run_record import find_run_record
from tba.run_store import open_run_store
from tba.searcher.engines import Engine as GeneratingEngine
from tba.searcher.engines import build, can_run_vllm, with_logprobs
from tba.searcher.loop import SearcherLoop, Surroundings
from tba.searcher.rewarding import num_workers
from tba.searcher.spool import Spool, SpoolLimits, shard_seconds
from tba.searcher.stats import SearcherStats
from tba.searcher.sync import Fetch, Poller
from tba.stop import StopFlag, stop_signals
from tba.store import AccessDenied, ObjectStore

TERMINATED_EXIT = 143
DEFAULT_GRACE_SECONDS = 45.0
"""Below the 60 s after which a pod is killed by default."""
STEP_BUDGET_SECONDS = 600.0
"""Liveness: loading a model or one step may take so long."""
_RUN_POLL_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
"""Beyond the grace, until a colocated searcher without its trainer kills itself."""


@dataclass(frozen=True, slots=True)
class SearcherOptions:
    """What the command line or the pod says."""

    storage: str
    name: str
    config_dir: Path | None = None
    """null: everything from the bucket's run.json, and defaults for the rest."""
    port: int | None = None
    """null: no HTTP."""
    spool_dir: Path | None = None
    """null: a folder of this machine's temporary directory."""
    exit_when_done: bool = False
    threads: int | None = None
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    gate_fd: int | None = None
    """Socket to the trainer whose device it shares (tba.gate); null: it shares none."""


def run_searcher(options: SearcherOptions) -> int:
    """Generate until SIGTERM (143), or until the run has ended if `exit_when_done` (0).

    Raises: UserError (64), StoreUnavailable (2, at the start only), RunReplaced (2); anything else is a crash (1).
    """
    if not is_searcher_name(options.name):
        raise UserError(f"--name must be lower-case letters, digits and '-', at most 63, got {options.name!r}")
    run_file = read_run_file(options.config_dir) if options.config_dir is not None else None
    favour_the_loop()
    configure(role="searcher", run=run_file.name if run_file else options.storage)
    bind(searcher=options.name)
    live = LiveSettings(options.config_dir, _defaults(options.storage))
    if options.threads is not None:
        _limit_threads(options.threads)
    with ExitStack() as stack:
        stopped = stack.enter_context(stop_signals())
        gate = _gate(options, stopped)
        stack.enter_context(trace.recording("searcher", options.name))
        heartbeat = telemetry.Heartbeat(STEP_BUDGET_SECONDS)
        ready: list[Callable[[], tuple[bool, str]]] = [lambda: (False, "starting")]
        if options.port is not None:  # before anything that may take long: probes begin with the process
            server = telemetry.serve(options.port, healthy=heartbeat.alive, ready=lambda: ready[0]())
            stack.callback(server.close)
        store = open_run_store(live().storage, options.storage)
        stack.callback(store.close)
        known: list[RunRecord] = []
        follows = following(store, lambda: live().storage, run_id=lambda: known[0].run_id if known else None)
        stack.enter_context(follows)
        record = await_record(store, stopped, beat=heartbeat.beat)
        if record is None:
            return TERMINATED_EXIT
        known.append(record)
        if options.config_dir is None:
            live = LiveSettings(None, _as_recorded(record, options.storage))
        loop = _assemble(options, run_file, record, live, store, stopped, heartbeat, stack, gate)
        ready[0] = lambda: loop.ready
        code = loop.run()
        if stopped.is_set():
            log.info(SIGNAL_RECEIVED, detail="asked to end: what was finished has been uploaded or stays in the spool")
        return code


def await_record(store: ObjectStore, stopped: StopFlag, *, beat: Callable[[], None]) -> RunRecord | None:
    """The bucket's run.json as soon as the trainer has made it; None if stopped before. Raises: StoreUnavailable."""
    waits = 0
    with stopped.interruptible():  # storage that does not answer is asked again for minutes
        while not stopped.is_set():
            beat()
            found: RunRecord | None = None
            try:
                found = find_run_record(store)
                detail = f"nothing at {store.uri} yet"
            except AccessDenied as error:  # without the right to list, S3 denies what does not exist
                detail = str(error)
            if found is not None:
                return found
            if waits % 30 == 0:
                log.info(DATA_AWAITED, awaited=RUN, detail=detail)
            waits += 1
            stopped.wait(_RUN_POLL_SECONDS)
    return None


def _assemble(
    options: SearcherOptions,
    run_file: RunFile | None,
    record: RunRecord,
    live: LiveSettings,
    store: ObjectStore,
    stopped: StopFlag,
    heartbeat: telemetry.Heartbeat,
    stack: ExitStack,
    gate: Gate | None,
) -> SearcherLoop:
    incarnation = new_nonce()
    sharing = live().trainer.colocated_searcher
    settings = with_logprobs(live().searcher.engine, record.config.objective)
    settings = settings if gate is None else share(settings, sharing)
    log.info(
        PROCESS_STARTED,
        pid=os.getpid(),
        run_id=record.run_id,
        incarnation=incarnation,
        engine=settings.type,
    )
    with heartbeat.allow("starting reward processes", STEP_BUDGET_SECONDS):
        base_dir = Path(run_file.base_dir) if run_file and run_file.base_dir else None
        pool = RewardPool(
            record.config.task.reward,
            num_workers=num_workers(live().reward_workers),
            timeout_seconds=live().reward_timeout_seconds,
            memory_bytes=live().reward_memory_bytes,
            search_path=base_dir,
            code=get_reward_code(store, record.reward_code),
        )
        stack.callback(pool.close)
        prompts = load_prompt_set(store, record.train_prompts)
        engine = build(settings, model=record.config.model)
    stack.callback(engine.close)
    stats = SearcherStats()

    def poll_seconds() -> float:
        usual = live().sync.poll_interval_seconds
        return usual if gate is None else min(usual, PASS_SECONDS)

    def remember() -> bool:  # deltas build on what is held, adapters on version 0
        return live().sync.delta.enabled or record.config.model.lora is not None

    poller = Poller(
        store,
        run_id=record.run_id,
        interval_seconds=poll_seconds,
        fetch=_fetch(engine, remember=remember),
    )

    def header(seq: int) -> ShardHeader:
        return ShardHeader(
            run=record.run_id,
            searcher=options.name,
            incarnation=incarnation,
            seq=seq,
            reward_version=pool.version,
            stats=stats.to_dict(),
        )

    spool_dir = (options.spool_dir or Path(tempfile.gettempdir()) / "tba-spool") / record.run_id / options.name
    stack.callback(_remove_empty, spool_dir)
    spool = Spool(
        store,
        spool_dir,
        header=header,
        window=lambda: poller.window,
        limits=lambda: SpoolLimits(shard_seconds=shard_seconds(poll_seconds())),
    )
    stack.callback(spool.close)
    stack.callback(poller.close)
    poller.start()
    spool.start()
    return SearcherLoop(
        Surroundings(
            store=store,
            engine=engine,
            pool=pool,
            poller=poller,
            spool=spool,
            record=record,
            prompts=prompts,
            walk=PromptWalk(len(prompts), record.config.objective.seed, incarnation),
            incarnation=incarnation,
            settings=live,
            samples_per_prompt=lambda: live().searcher.samples_per_prompt,
            stats=stats,
            stopped=stopped,
            exit_when_done=options.exit_when_done,
            grace_seconds=options.grace_seconds,
            peak_flops=_peak_flops(settings, record.config.model),
            gate=gate,
            free_memory=sharing.free_memory,
        ),
        heartbeat=heartbeat,
    )


def _gate(options: SearcherOptions, stopped: StopFlag) -> Gate | None:
    if options.gate_fd is None:
        return None
    leave = die_with_trainer(stopped.set, grace_seconds=options.grace_seconds + _LEAVE_SECONDS)
    return Gate(options.gate_fd, on_closed=leave)


def share(engine: Engine, sharing: ColocatedSearcher) -> Engine:
    """The settings of an engine on the trainer's own GPU."""
    changes: dict[str, Any] = {"tensor_parallel_size": 1, "gpu_memory_utilization": sharing.memory_fraction}
    if sharing.free_memory and engine.type == "vllm":
        changes["extra_args"] = {**engine.extra_args, "enable_sleep_mode": True}
    return engine.model_copy(update=changes)


def _defaults(uri: str) -> LiveConfig:
    """Of a searcher that is told nothing but the bucket, until it has read run.json there."""
    if not uri.startswith(("s3://", "file://")):
        raise UserError(f"--storage must begin with s3:// or file://, got {uri!r}")
    return LiveConfig(storage=Storage(uri=uri))


def _as_recorded(record: RunRecord, uri: str) -> LiveConfig:
    """The run's first live settings, with this searcher's own way to the bucket and an engine that runs here."""
    engine = record.live.searcher.engine
    if engine.type == "vllm" and not can_run_vllm():
        engine = engine.model_copy(update={"type": "transformers"})
    searcher = record.live.searcher.model_copy(update={"engine": engine})
    return record.live.model_copy(update={"storage": Storage(uri=uri), "searcher": searcher})


def _fetch(engine: GeneratingEngine, *, remember: Callable[[], bool]) -> Fetch:
    if engine.needs_weights:
        from tba.snapshots import SnapshotFetcher
        from tba.snapshots.hostcache import HostCache

        cache = HostCache.from_environment()
        return SnapshotFetcher(remember=remember, merge=lambda: not engine.takes_adapters, cache=cache)
    from tba.snapshots import Snapshot, fetch_manifest

    return lambda store, key: Snapshot(key, fetch_manifest(store, key), {}, {})


def _peak_flops(engine: Engine, model: Model) -> float | None:
    """Of the GPUs that the engine uses: one, or with vLLM as many as it is told to."""
    if engine.type == "fake":
        return None
    num_gpus = engine.tensor_parallel_size if engine.type == "vllm" else 1
    return peak_flops(gpu_model(), model.dtype, num_gpus)


def _remove_empty(spool_dir: Path) -> None:
    """What a searcher that uploaded everything leaves behind: nothing. Others may be at work in the same places."""
    with suppress(OSError):
        for folder in (spool_dir, *spool_dir.parents[:2]):
            folder.rmdir()


def _limit_threads(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
