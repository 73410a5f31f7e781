"""Time to reward on `count`: arms by number, resumable by (task, arm, seed), all from one start folder.

    1 own synchronous loop, 1 GPU        2 the same on 2 GPUs, data-parallel
    3 TRL GRPO, 2 GPUs colocated         4 TRL AsyncGRPO, 1 engine + 1 trainer
    5 ours asynchronous, 1 searcher + 1 trainer
    6 the same, and the trainer hosts another searcher
    7 ours asynchronous, 3 searchers + 1 trainer, a GPU each
    8 as 5 with a GRPO-type objective: the system against the objective
    9 asynchronous, and small searchers share both cards: `--gpus 0,1,1,1,0,0` names the trainer's card, then each
      searcher's; `--searchers 5x128` how many and of how many places

`--task count-slow`: as `count`, and each reward takes 200 ms, as a remote grader's would; how each arm calls it is in
grading.py.

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_count.py --start examples/count/build --arms 5 1 --seeds 0 1 2
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_count.py --rehearse       (a minute, on a CPU)
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_count.py --table          (rows and curves from the runs so far)

Scaling: arm 7 with `--set searcher.replicas=1 --variant "1 searcher"`, then with 2 and "2 searchers", then as it is.
Arm 5 on one card (`--gpus 0`): both roles share it, each with its process; give the engine a cache of a fixed size with
`--set searcher.engine.extraArgs.kv_cache_memory_bytes=…`, since vLLM counts what other processes hold as its own.

Runs are appended to docs/results/gpu_count.jsonl; the table is gpu_count.json there, the curves are gpu_count.svg
and gpu_count_one_card.svg.
Scoring held-out prompts is on no arm's clock. `--set path=value` changes the job of every arm; name the change with
--variant.
"""

import argparse
import json
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.count_arms import RUNNERS
from bench.gpu.count_runs import (
    ARMS,
    ASYNCHRONOUS,
    GRPO,
    MANY,
    SHARED,
    SLOW_TASK,
    CountRun,
    append_run,
    judge,
    read_runs,
)
from bench.gpu.grading import slow_settings
from bench.gpu.places import ROOT, end_children_too, tiny_start
from bench.results import machine, own_command, table, write

RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True, slots=True)
class Task:
    """What a run is about."""

    items: str
    """Name of its items in examples/count/count_task.py."""
    max_tokens: int
    """Of a response."""
    max_model_len: int
    """Of prompt and response."""
    settings: tuple[str, ...] = ()


TASKS = {
    "count": Task("count", 256, 512),
    "count-long": Task("count-long", 512, 768),
    "count-short": Task("count-short", 64, 256),
    SLOW_TASK: Task("count", 256, 512, tuple(slow_settings(0.2))),
}
ARM_SETTINGS = {
    6: ["trainer.colocatedSearcher.enabled=true"],
    MANY: ["searcher.replicas=3", "sync.intervalSteps=2"],
    # What the objective of arm 8 needs: see grpo_trainer.py.
    GRPO: [
        "objective.parameters={ratioAlpha: 1.0, ratioClip: 3.0}",
        "buffer.deduplicate=false",
        "searcher.engine.extraArgs.logprobsShare=1.0",
    ],
    # A step of a small model costs an engine more Python than GPU: several engines fill a card. vLLM would count what
    # the others hold as its own, so each is given a cache of a fixed size.
    SHARED: [
        "sync.intervalSteps=2",  # weights for five cost more than one step's worth is worth
        f"searcher.engine.extraArgs.kv_cache_memory_bytes={3 * 2**30}",
    ],
}
REHEARSAL = [
    "objective.promptsPerBatch=4",
    "objective.responsesPerPrompt=4",
    "searcher.samplesPerPrompt=4",
    "buffer.minInitialTrajectories=16",
    "task.evaluation.maxPrompts=8",
    "task.sampling.maxTokens=12",
    "searcher.engine.type=transformers",
    "searcher.engine.maxNumSeqs=16",
    "model.dtype=float32",
    "searcher.engine.extraArgs={}",
]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="what examples/count/make_start.py made")
    parser.add_argument("--task", choices=list(TASKS), default="count")
    parser.add_argument("--arms", type=int, nargs="+", choices=list(ARMS), default=[5, 1, 2, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="of a run, evaluations left out")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps; 0: never, for looking at speed alone")
    parser.add_argument("--gpus", default="0,1", help="cards to use")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="PATH=VALUE")
    parser.add_argument("--searchers", type=layout, default=(5, 128), metavar="NxPLACES", help="of arm 9")
    parser.add_argument("--engines", type=int, default=1, help="that a card has in arms 1 and 2, each in a process")
    parser.add_argument("--variant", default="")
    parser.add_argument("--runs", type=Path, default=RESULTS / "gpu_count.jsonl")
    parser.add_argument(
        "--run-root", type=Path, help="for the stores of asynchronous runs; default: a temporary folder"
    )
    parser.add_argument("--rehearse", action="store_true", help="everything on a CPU with a tiny model; writes nothing")
    parser.add_argument("--table", action="store_true", help="only write the table, and the curves beside it")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "gpu_count.json")
    options = parser.parse_args()
    end_children_too()
    with tempfile.TemporaryDirectory() as folder:
        if options.rehearse:
            rehearse(options, Path(folder))
        if not options.table:
            if options.start is None:
                parser.error("name --start")
            if (options.settings or options.engines > 1) and not options.variant and not options.rehearse:
                parser.error("--set and --engines change what is compared: name the change with --variant")
            if not options.evaluate_every and not {*options.arms} <= {1, 2, *ASYNCHRONOUS}:
                parser.error("--evaluate-every 0: TRL's arms are told by their held-out scores alone")
            run_all(options, Path(folder))
        runs = read_runs(options.runs)
        rows = judge(runs)
        print(table(rows))
        write(rows, options.output)
        if options.table:  # a GPU host need not have what draws
            from bench.gpu.learning_curves import draw_all

            draw_all(runs, options.output.with_suffix(".svg"))


def layout(text: str) -> tuple[int, int]:
    """Searchers and the places of each, from `5x128`. Raises: ValueError, which argparse tells."""
    number, places = map(int, text.split("x"))
    return number, places


def rehearse(options: argparse.Namespace, folder: Path) -> None:
    """Small enough for a minute, and away from the real results."""
    options.start = tiny_start(folder / "start", task=TASKS[options.task].items)
    options.settings = REHEARSAL + options.settings
    # Arm 3 has its engine in a process with CUDA; arm 4 is rehearsed where TRL is, with vLLM for CPUs: two minutes.
    unable = {3} if find_spec("trl") else {3, 4}
    print(f"not rehearsed here: {sorted(unable & set(options.arms))}", flush=True)
    options.arms = [arm for arm in options.arms if arm not in unable]
    options.seconds, options.max_steps, options.evaluate_every, options.gpus = 8.0, 4, 2, ""
    options.runs, options.output = folder / "runs.jsonl", folder / "rows.json"


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Every run that is not there yet; one that fails is told and the next one begins."""
    done, start = {run.key for run in read_runs(options.runs)}, start_of(options.start)
    failed = []
    for seed in options.seeds:
        for arm in options.arms:
            key = (options.task, arm, seed, options.variant, start)
            if key in done:
                print(f"arm {arm}, seed {seed}: there already", flush=True)
                continue
            print(f"== arm {arm} ({ARMS[arm]}), {options.task}, seed {seed}", flush=True)
            started = time.monotonic()
            try:
                run = run_one(options, arm, seed, folder)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                failed.append(f"arm {arm}, seed {seed}: {error}")
                print(f"failed: {failed[-1]}", flush=True)
                continue
            append_run(options.runs, run)
            print(f"== arm {arm}: {len(run.steps)} steps, {time.monotonic() - started:.0f} s in all", flush=True)
    if failed and len(failed) == len(options.seeds) * len(options.arms):
        raise SystemExit("no run succeeded")


def run_one(options: argparse.Namespace, arm: int, seed: int, folder: Path) -> CountRun:
    """One run. Raises: RuntimeError, CalledProcessError if a process of it fails."""
    settings = job_settings(options, arm, seed)
    gpus = options.gpus.split(",")
    found = RUNNERS[arm](options, arm, settings, gpus, folder)
    if arm == SHARED:
        found["facts"]["searchers"] = "{}x{}".format(*options.searchers)
    return CountRun(
        task=options.task,
        arm=arm,
        seed=seed,
        gpus=1 if arm == 1 else len(set(gpus)),
        variant=options.variant,
        start=start_of(options.start),
        settings=options.settings,
        machine=machine() + cards_of(),
        date=datetime.now(UTC).date().isoformat(),
        command=own_command().replace("PYTHONPATH=workloads ", "PYTHONPATH=workloads:tests "),
        **found,
    )


def shared_settings(number: int, places: int) -> list[str]:
    """How many searchers arm 9 has, and of what size."""
    return [f"searcher.replicas={number}", f"searcher.engine.maxNumSeqs={places}"]


def start_of(folder: Path) -> str:
    """Digest of the weights there, as examples/count/make_start.py wrote it down. Raises: SystemExit without it."""
    try:
        return json.loads((folder / "made.json").read_text())["weights"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{folder} is no start ({error!r}): make it with examples/count/make_start.py") from error


def job_settings(options: argparse.Namespace, arm: int, seed: int) -> list[str]:
    """Overrides of examples/count.yaml; what the user sets comes last and wins."""
    start = options.start.resolve()
    task = TASKS[options.task]
    return [
        f"model.uri=file://{start / 'start'}",
        f"model.maxModelLen={task.max_model_len}",
        f"task.prompts.uri=file://{start / 'train.jsonl'}",
        f"task.evaluation.prompts.uri=file://{start / 'test.jsonl'}",
        f"task.evaluation.everySteps={10**6}",
        f"task.sampling.maxTokens={task.max_tokens}",
        f"objective.seed={seed}",
        f"objective.totalSteps={options.max_steps}",
        f"storage.checkpoints.everySteps={options.max_steps}",
        # Colocated arms share a card with the trainer.
        f"searcher.engine.gpuMemoryUtilization={0.85 if arm in (4, 5, 7, 8, 9) else 0.3}",
        # Fresh data gains nothing by it and would pay for telling log-probs: asynchronous arms name it, as a variant.
        "objective.parameters.ratioAlpha=0",
        *task.settings,
        *ARM_SETTINGS.get(arm, []),
        *(shared_settings(*options.searchers) if arm == SHARED else []),
        *options.settings,
    ]


def cards_of() -> str:
    """GPUs, of which this process, which loads no torch, knows nothing."""
    with suppress(OSError, subprocess.CalledProcessError):
        argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        return f", {len(names)} x {names[0]}" if names else ""
    return ""


if __name__ == "__main__":
    main()
