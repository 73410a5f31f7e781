"""Time to reward on `count`: arms by number, resumable by (task, arm, seed), all from one start folder.

    1 own synchronous loop, 1 GPU        2 the same on 2 GPUs, data-parallel
    3 TRL GRPO, 2 GPUs colocated         5 ours asynchronous, 1 searcher + 1 trainer
    6 the same, and the trainer hosts another searcher       7 ours asynchronous, 3 searchers + 1 trainer (4 GPUs)

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_count.py --start examples/count/build --arms 5 1 --seeds 0 1 2
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_count.py --rehearse       (a minute, on a CPU)
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_count.py --table          (rows from the runs so far)

Scaling: arm 7 with `--set searcher.replicas=1 --variant "1 searcher"`, then 2, then as it is.
Arm 5 on one card (`--gpus 0`): both roles share it, each with its process; give the engine a cache of a fixed size with
`--set searcher.engine.extraArgs.kv_cache_memory_bytes=…`, since vLLM counts what other processes hold as its own.

Runs are appended to docs/results/gpu_count.jsonl; the table is docs/results/gpu_count.json. Scoring held-out prompts
is on no arm's clock. `--set path=value` changes the job of every arm; name the change with --variant.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.count_runs import ARMS, ASYNCHRONOUS, CountRun, append_run, judge, read_runs
from bench.gpu.places import JOB, ROOT, tiny_start
from bench.results import machine, own_command, table, write

RESULTS = ROOT / "docs" / "results"
LIMITS = {"count": (256, 512), "count-long": (512, 768), "count-short": (64, 256)}
"""Response tokens, prompt and response tokens."""
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
]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="what examples/count/make_start.py made")
    parser.add_argument("--task", choices=list(LIMITS), default="count")
    parser.add_argument("--arms", type=int, nargs="+", choices=list(ARMS), default=[5, 1, 2, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="of a run, evaluations left out")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--gpus", default="0,1", help="cards to use")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="PATH=VALUE")
    parser.add_argument("--variant", default="")
    parser.add_argument("--runs", type=Path, default=RESULTS / "gpu_count.jsonl")
    parser.add_argument(
        "--run-root", type=Path, help="for the stores of asynchronous runs; default: a temporary folder"
    )
    parser.add_argument("--rehearse", action="store_true", help="everything on a CPU with a tiny model; writes nothing")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "gpu_count.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.rehearse:
            rehearse(options, Path(folder))
        if not options.table:
            if options.start is None:
                parser.error("name --start")
            if options.settings and not options.variant and not options.rehearse:
                parser.error("--set changes the task: name the change with --variant")
            run_all(options, Path(folder))
        rows = judge(read_runs(options.runs))
        print(table(rows))
        write(rows, options.output)


def rehearse(options: argparse.Namespace, folder: Path) -> None:
    """Small enough for a minute, and away from the real results."""
    options.start = tiny_start(folder / "start", task=options.task)
    options.settings = REHEARSAL + options.settings
    options.arms = [a for a in options.arms if a != 3]  # the peer has no CPU engine worth a rehearsal
    options.seconds, options.max_steps, options.evaluate_every, options.gpus = 8.0, 4, 2, ""
    options.runs, options.output = folder / "runs.jsonl", folder / "rows.json"


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Every run that is not there yet; one that fails is told and the next one begins."""
    done = {run.key for run in read_runs(options.runs)}
    failed = []
    for seed in options.seeds:
        for arm in options.arms:
            key = (options.task, arm, seed, options.variant)
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
    runners = {1: run_sync, 2: run_sync, 3: run_trl} | dict.fromkeys(ASYNCHRONOUS, run_async)
    found = runners[arm](options, arm, settings, gpus, folder)
    return CountRun(
        task=options.task,
        arm=arm,
        seed=seed,
        gpus=1 if arm == 1 else len(set(gpus)),
        variant=options.variant,
        settings=options.settings,
        machine=machine() + cards_of(),
        date=datetime.now(UTC).date().isoformat(),
        command=own_command().replace("PYTHONPATH=workloads ", "PYTHONPATH=workloads:tests "),
        **found,
    )


def job_settings(options: argparse.Namespace, arm: int, seed: int) -> list[str]:
    """Overrides of examples/count.yaml; what the user sets comes last and wins."""
    start = options.start.resolve()
    max_tokens, max_model_len = LIMITS[options.task]
    return [
        f"model.uri=file://{start / 'start'}",
        f"model.maxModelLen={max_model_len}",
        f"task.prompts.uri=file://{start / 'train.jsonl'}",
        f"task.evaluation.prompts.uri=file://{start / 'test.jsonl'}",
        f"task.evaluation.everySteps={10**6}",
        f"task.sampling.maxTokens={max_tokens}",
        f"objective.seed={seed}",
        f"objective.totalSteps={options.max_steps}",
        f"storage.checkpoints.everySteps={options.max_steps}",
        # Colocated arms share a card with the trainer.
        f"searcher.engine.gpuMemoryUtilization={0.85 if arm in (5, 7) else 0.3}",
        *({6: ["trainer.colocatedSearcher.enabled=true"], 7: ["searcher.replicas=3"]}.get(arm, [])),
        *options.settings,
    ]


def run_sync(
    options: argparse.Namespace, arm: int, settings: list[str], gpus: list[str], folder: Path
) -> dict[str, Any]:
    """Arms 1 and 2: a process a card."""
    from tba.cli.local_run import free_port

    world, port, result = (1 if arm == 1 else 2), free_port(), folder / f"sync-{time.monotonic_ns()}.json"
    children = []
    for rank in range(world):
        argv = [sys.executable, "-m", "bench.gpu.arm_sync", "--job", str(JOB), "--result", str(result)]
        argv += ["--rank", str(rank), "--world", str(world), "--port", str(port)]
        argv += ["--seconds", str(options.seconds), "--max-steps", str(options.max_steps)]
        argv += ["--evaluate-every", str(options.evaluate_every), "--cards", *filter(None, gpus[:world])]
        for setting in settings:
            argv += ["--set", setting]
        children.append(subprocess.Popen(argv, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]}))
    return _await(children, result)


def run_trl(
    options: argparse.Namespace, arm: int, settings: list[str], gpus: list[str], folder: Path
) -> dict[str, Any]:
    """Arm 3: TRL in its own two processes."""
    result = folder / f"trl-{time.monotonic_ns()}.json"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(gpus)}"]
    argv += ["-m", "bench.gpu.arm_trl", "--job", str(JOB), "--result", str(result), "--task", options.task]
    argv += ["--seconds", str(options.seconds), "--max-steps", str(options.max_steps)]
    argv += ["--evaluate-every", str(options.evaluate_every)]
    for setting in settings:
        argv += ["--set", setting]
    child = subprocess.Popen(argv, env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)})
    return _await([child], result)


def _await(children: list[subprocess.Popen[bytes]], result: Path) -> dict[str, Any]:
    """Until all have ended, or one has failed: then the others wait for it in vain."""
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() not in (None, 0) for child in children):
                break
            time.sleep(0.2)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    codes = [child.returncode for child in children]
    if not result.exists():
        raise RuntimeError(f"the processes ended with {codes} and left no result: their output is above")
    return json.loads(result.read_text())


def run_async(
    options: argparse.Namespace, arm: int, settings: list[str], gpus: list[str], folder: Path
) -> dict[str, Any]:
    """Arms 5 to 7: the trainer on the first card, searchers on the others."""
    from bench.gpu import arm_async

    run_dir = (options.run_root or folder) / f"async-{time.monotonic_ns()}"
    # Searchers would answer evaluations on the run's clock; the snapshots are scored afterwards instead.
    without = [*settings, "task.evaluation.prompts=null"]
    played = arm_async.play(JOB, without, run_dir, seconds=options.seconds, gpus=gpus)
    scores = arm_async.score_snapshots(JOB, settings, played.uri, every=options.evaluate_every, gpu=gpus[0])
    return arm_async.outcome(played, scores)


def cards_of() -> str:
    """GPUs, of which this process, which loads no torch, knows nothing."""
    with suppress(OSError, subprocess.CalledProcessError):
        argv = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        return f", {len(names)} x {names[0]}" if names else ""
    return ""


if __name__ == "__main__":
    main()
