"""What `tba run` is going to do, decided before anything starts."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba import trace
from tba.cli.cards import Cards, share_out, visible_cards
from tba.cli.jobfile import absolute_uri, load_job
from tba.cli.supervisor import Program, RestartPolicy
from tba.cli.target import RUNS, STORAGE_FILE, StorageTarget
from tba.contracts.config import Engine
from tba.contracts.errors import UserError
from tba.contracts.job import TBAJob
from tba.contracts.supported import refuse_unsupported
from tba.mounts import claim_path, config_map_file
from tba.rewards.sandbox import RewardPool, reward_source

EMBEDDED = "embedded"
BUCKET = "tba"
_CACHE = "kv_cache_memory_bytes"
_SEARCHER_GRACE = 0.75
"""Share of its grace period that a searcher may spend on uploads: 45 of 60 s, the rest is for its own end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked job and where it runs."""

    job: TBAJob
    job_file: Path
    directory: Path
    searchers: int
    storage: StorageTarget
    embedded: bool
    notes: tuple[str, ...]
    """What differs from the job file, for the user to know."""
    cards: Cards = Cards()
    """Who gets which GPU."""
    fresh: bool = False
    """Delete what an earlier run left in the directory first."""
    trace: Path | None = None
    """Where each process writes its timeline; None: nowhere."""
    command: tuple[str, ...] = (sys.executable, "-m", "tba")
    """What starts a process of this package."""

    @property
    def config_directory(self) -> Path:
        """Holds run.json and live.json."""
        return self.directory / "config"

    @property
    def colocated(self) -> bool:
        """Whether the trainer starts a searcher of its own."""
        return self.job.spec.trainer.colocated_searcher.enabled is True

    @property
    def threads(self) -> int:
        """Compute threads a process."""
        return max(1, num_cores() // (self.ranks + self.searchers))

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.job.spec.trainer.num_ranks

    def programs(self, *, port: int, environment: dict[str, str]) -> tuple[Program, list[Program]]:
        """Trainer and searchers. `port`: of the trainer's HTTP server, on loopback."""
        where = ["--storage", self.storage.uri, "--config", str(self.config_directory)]
        env = {
            "OMP_NUM_THREADS": str(self.threads),
            "TBA_HTTP_HOST": "127.0.0.1",
            "TOKENIZERS_PARALLELISM": "false",
            **({trace.DIRECTORY: str(self.trace)} if self.trace else {}),
            **environment,
        }
        spec, logs = self.job.spec, self.directory / "logs"
        grace = spec.trainer.termination_grace_period_seconds
        searcher_grace = spec.searcher.termination_grace_period_seconds
        spool = ["--grace-seconds", str(_SEARCHER_GRACE * searcher_grace), "--spool-dir", str(self.directory / "spool")]
        ranks = ["--ranks", str(self.ranks)] if self.ranks > 1 else []
        trainer = Program(
            name="trainer",
            argv=[*self.command, "trainer", *where, *ranks, "--port", str(port), "--grace-seconds", str(grace)],
            log=logs / "trainer.log",
            env={
                **env,
                **self.cards.of_trainer(),
                "TBA_COLOCATED_LOG": str(logs / "trainer-colocated.log"),
                "TBA_SPOOL_DIR": str(self.directory / "spool"),
            },
            grace_seconds=grace,
        )
        searchers = [
            Program(
                name=f"searcher-{i}",
                argv=[*self.command, "searcher", *where, *spool, "--name", f"searcher-{i}"],
                log=logs / f"searcher-{i}.log",
                env={**env, **self.cards.of_searcher(i)},
                grace_seconds=searcher_grace,
            )
            for i in range(self.searchers)
        ]
        return trainer, searchers

    @property
    def restart_policy(self) -> RestartPolicy:
        """From the job's runPolicy."""
        return RestartPolicy(backoff_limit=self.job.spec.run_policy.backoff_limit)

    def check_reward(self) -> None:
        """Load the reward once, in a process of its own. Raises: UserError. Else run.json would keep the mistake."""
        if self.searchers == 0 and not self.colocated:
            return  # it need not be here
        with suppress(RuntimeError):  # not the user's mistake: searchers try again
            RewardPool(self.job.spec.task.reward, num_workers=1, search_path=self.job_file.parent).close()

    def to_dict(self) -> dict[str, Any]:
        """For `--dry-run --json`: what would start."""
        trainer, searchers = self.programs(port=0, environment={})
        return {
            "job": self.job.model_dump(mode="json"),
            "directory": str(self.directory),
            "storage": self.storage.model_dump(mode="json"),
            "threads": self.threads,
            "gpus": {"trainer": self.cards.trainer, "searchers": self.cards.searchers},
            "processes": [list(p.argv) for p in (trainer, *searchers)],
            "notes": list(self.notes),
        }

    def describe(self) -> str:
        """For people."""
        objective = self.job.spec.objective
        lines = [
            f"{self.job.owner}: {objective.total_steps} steps of {objective.prompts_per_batch} groups x "
            f"{objective.responses_per_prompt} responses",
            f"  directory  {self.directory}",
            f"  storage    {EMBEDDED + ' S3 server, ' if self.embedded else ''}{self.storage.uri}",
            f"  processes  1 trainer{self._beside_the_trainer()}, {_count(self.searchers, 'searcher')} "
            f"({self.job.spec.searcher.engine.type}), {_count(self.threads, 'thread')} each",
        ]
        if cards := self.cards.describe():
            lines.append(f"  GPUs       {cards}")
        return "\n".join([*lines, *(f"  note       {n}" for n in self.notes)])

    def _beside_the_trainer(self) -> str:
        if self.colocated:
            return " with a searcher"
        return f" of {self.ranks} ranks" if self.ranks > 1 else ""


def plan(
    job_file: Path,
    *,
    overrides: list[str],
    searchers: int | None,
    storage: str,
    run_dir: Path | None,
    fresh: bool = False,
    can_run_vllm: Callable[[], bool] | None = None,
    gpus: Sequence[str] | None = None,
) -> Plan:
    """Check everything that can be checked without starting anything. `gpus`: default, what is visible.

    Raises: UserError.
    """
    job = load_job(job_file, overrides)
    refuse_unsupported(job.spec.run_config())
    reward_source(job.spec.task.reward, job_file.resolve().parent)
    notes: list[str] = []
    directory = (run_dir or RUNS / job.metadata.name).resolve()
    target = _choose_storage(job, storage, directory, notes)
    if fresh and storage not in ("local", EMBEDDED):
        raise UserError(
            f"--fresh deletes local runs only, got --storage {storage}: use `tba storage delete URI`, or another prefix"
        )
    if fresh or not _may_hold_run(storage, directory):
        check_files(job)
    spec = job.spec
    if spec.searcher.engine.type == "vllm" and not (can_run_vllm or _can_run_vllm)():
        notes.append("engine vllm needs a GPU and the package vllm: transformers is taken instead")
        engine = spec.searcher.engine.model_copy(update={"type": "transformers"})
        spec = spec.model_copy(update={"searcher": spec.searcher.model_copy(update={"engine": engine})})
    num_searchers = spec.searcher.replicas if searchers is None else searchers
    if spec.trainer.colocated_searcher.enabled is True:
        _check_turns(job, num_searchers)
    elif searchers == 0:
        notes.append(f"no searchers here: training waits for others, `tba searcher --storage {target.uri} --name NAME`")
    cards = share_out(
        visible_cards(os.environ) if gpus is None else gpus,
        ranks=spec.trainer.num_ranks,
        searchers=num_searchers,
        each=spec.searcher.engine.tensor_parallel_size if spec.searcher.engine.type == "vllm" else 1,
    )
    notes += _shared_cards(cards, spec.searcher.engine)
    address = {
        "uri": target.uri, "endpoint": target.endpoint, "region": target.region,
        "force_path_style": target.force_path_style,
    }  # fmt: skip
    spec = spec.model_copy(update={"storage": spec.storage.model_copy(update=address)})
    return Plan(
        job=job.model_copy(update={"spec": spec}),
        job_file=job_file.resolve(),
        directory=directory,
        searchers=num_searchers,
        storage=target,
        embedded=storage == EMBEDDED,
        cards=cards,
        fresh=fresh,
        notes=tuple(notes),
    )


def check_files(job: TBAJob, *, begun: bool = False, saved: bool = False) -> None:
    """A missing file is told before processes start. Raises: UserError.

    A run that has `begun` has its prompts in the bucket, one that has `saved` a checkpoint its model too.
    """
    spec, task = job.spec, job.spec.task
    if not saved and spec.fork_from is None:
        _check_uri("spec.model.uri", spec.model.uri, "a run with a checkpoint")
    if begun:
        return
    for field, prompts in (
        ("spec.task.prompts", task.prompts),
        ("spec.task.evaluation.prompts", task.evaluation.prompts),
    ):
        if prompts and prompts.uri:
            _check_uri(f"{field}.uri", prompts.uri, "a run that has begun")
        if prompts and prompts.config_map_ref:
            config_map_file(prompts.config_map_ref, field)


def _shared_cards(cards: Cards, engine: Engine) -> list[str]:
    if engine.type != "vllm" or _CACHE in engine.extra_args:
        return []
    return [
        f"GPU {card} is shared by {' and '.join(users)}: set searcher.engine.extraArgs.{_CACHE}, since vLLM counts "
        "what others hold as its own (docs/how-to/more-searchers.md)"
        for card, users in cards.shared().items()
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose_storage(job: TBAJob, storage: str, directory: Path, notes: list[str]) -> StorageTarget:
    own = StorageTarget.of(job.spec.storage)
    if storage == "job":
        return own
    if storage == EMBEDDED:
        return StorageTarget(uri=f"s3://{BUCKET}/{job.metadata.name}")
    if storage == "local":
        notes.append(f"storage is a local directory; `--storage job` takes the job file's {own.uri}")
        return StorageTarget(uri=f"file://{directory / 'store'}")
    if storage.startswith("file://"):
        return StorageTarget(uri=absolute_uri(storage, Path.cwd()) or storage)
    if storage.startswith("s3://"):
        return own.model_copy(update={"uri": storage})
    folder = f": a folder is file://{Path(storage).resolve()}" if "/" in storage and "://" not in storage else ""
    raise UserError(f"--storage must be local, job, embedded, s3://... or file://..., got {storage!r}{folder}")


def _check_turns(job: TBAJob, num_searchers: int) -> None:
    """The trainer's own searcher works while the trainer waits, so there must be something that it waits for."""
    buffer = job.spec.buffer
    too_old = buffer.max_policy_lag is not None and (
        buffer.max_replay_lag is not None or buffer.on_policy_probability == 1
    )
    if num_searchers == 0 and buffer.max_replay_ratio is None and not too_old:
        raise UserError(
            "spec.trainer.colocatedSearcher wakes when the trainer waits, and without buffer.maxReplayRatio, or both "
            "maxPolicyLag and maxReplayLag, it never would again: set them, or add searchers"
        )


def _check_uri(field: str, uri: str, needless: str) -> None:
    """`needless`: who needs no such file any more."""
    if uri.startswith("file://") and not Path(uri.removeprefix("file://")).exists():
        raise UserError(
            f"{field}: no such file or directory, got {uri}: make it, or correct the path; "
            f"only {needless} can do without it"
        )
    if uri.startswith("pvc://"):
        claim_path(uri, field)


def _may_hold_run(storage: str, directory: Path) -> bool:
    """A store in this directory holds a run only if `tba run` has been here; any other has to be asked."""
    return storage not in ("local", EMBEDDED) or (directory / STORAGE_FILE).is_file()


def _can_run_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None and (
        Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    )
