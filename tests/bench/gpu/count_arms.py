"""How bench_count.py runs an arm: its processes, on its cards, to what it left."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.gpu.busy import Busy
from bench.gpu.count_runs import ASYNCHRONOUS, GRPO
from bench.gpu.places import JOB

Found = dict[str, Any]
_SERVER_STOP_SECONDS = 20.0


def run_sync(options: argparse.Namespace, arm: int, settings: list[str], gpus: list[str], folder: Path) -> Found:
    """Arms 1 and 2: a process a card."""
    from tba.cli.local_run import free_port

    world, port, result = (1 if arm == 1 else 2), free_port(), _result(folder)
    children = []
    for rank in range(world):
        argv = [sys.executable, "-m", "bench.gpu.arm_sync", *_common(options, settings, result)]
        argv += ["--engines", str(options.engines), "--rank", str(rank), "--world", str(world), "--port", str(port)]
        argv += ["--cards", *filter(None, gpus[:world])]
        children.append(subprocess.Popen(argv, env=_on(gpus[rank % len(gpus)])))
    return _await(children, result)


def run_trl(options: argparse.Namespace, arm: int, settings: list[str], gpus: list[str], folder: Path) -> Found:
    """Arm 3: TRL in its own two processes."""
    result = _result(folder)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(gpus)}"]
    argv += ["-m", "bench.gpu.arm_trl", *_common(options, settings, result)]
    return _await([subprocess.Popen(argv, env=_on(",".join(gpus)))], result)


def run_trl_async(options: argparse.Namespace, arm: int, settings: list[str], gpus: list[str], folder: Path) -> Found:
    """Arm 4: its trainer on the first card, its engine's server on the last; then the weights it kept are scored."""
    from bench.gpu import arm_async
    from bench.gpu.trl_server import serve

    from tba.cli.jobfile import load_job
    from tba.cli.local_run import free_port

    port, result, store = free_port(), _result(folder), f"file://{_run_dir(options, folder, 'trl')}"
    log = result.with_suffix(".server.log")
    busy = Busy(sorted({int(g) for g in gpus if g}))
    server = serve(load_job(JOB, settings).spec, port=port, log=log, env=_on(gpus[-1]))
    try:
        argv = [sys.executable, "-m", "bench.gpu.arm_trl_async", *_common(options, settings, result)]
        argv += ["--server", f"http://127.0.0.1:{port}", "--store", store]
        found = _await([subprocess.Popen(argv, env=_on(gpus[0]))], result, needed=server)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; the server: {log.read_text(errors='replace')[-2000:]}") from error
    finally:
        _end_group(server)
        busy.close()
    found["facts"]["GPU busy, %"] = busy.mean(*found.pop("between")) or busy.problem or "no sample"
    scores = arm_async.score_snapshots(JOB, settings, store, every=options.evaluate_every, gpu=gpus[0])
    return found | {"held_out": at_steps(found["steps"], scores)}


def run_async(options: argparse.Namespace, arm: int, settings: list[str], gpus: list[str], folder: Path) -> Found:
    """Arms 5 to 9: the trainer on the first card named, each searcher on the next, the rest on the last."""
    from bench.gpu import arm_async

    # Searchers would answer evaluations on the run's clock; the snapshots are scored afterwards instead.
    without = [*settings, "task.evaluation.prompts=null"]
    trainer = "bench.gpu.grpo_trainer" if arm == GRPO else "tba"
    played = arm_async.play(
        JOB, without, _run_dir(options, folder, "async"), seconds=options.seconds, gpus=gpus, trainer=trainer
    )
    alone = [*settings, "searcher.engine.maxNumSeqs=512"]  # whoever scores has the card to itself
    scores = arm_async.score_snapshots(JOB, alone, played.uri, every=options.evaluate_every, gpu=gpus[0])
    return arm_async.outcome(played, scores)


RUNNERS: dict[int, Callable[..., Found]] = {1: run_sync, 2: run_sync, 3: run_trl, 4: run_trl_async}
RUNNERS |= dict.fromkeys(ASYNCHRONOUS, run_async)


def at_steps(steps: list[list[float]], scores: dict[int, float]) -> list[tuple[int, float, float]]:
    """(step, seconds, score) of scored weights; step n ended at the n-th row's time, and 0 at 0."""
    at = [0.0, *(row[0] for row in steps)]
    return sorted((step, at[step], score) for step, score in scores.items() if step < len(at))


def _common(options: argparse.Namespace, settings: list[str], result: Path) -> list[str]:
    argv = ["--job", str(JOB), "--result", str(result), "--seconds", str(options.seconds)]
    argv += ["--max-steps", str(options.max_steps), "--evaluate-every", str(options.evaluate_every)]
    for setting in settings:
        argv += ["--set", setting]
    return argv


def _result(folder: Path) -> Path:
    return folder / f"{time.monotonic_ns()}.json"


def _run_dir(options: argparse.Namespace, folder: Path, name: str) -> Path:
    return (options.run_root or folder) / f"{name}-{time.monotonic_ns()}"


def _on(cards: str) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": cards}


def _await(
    children: list[subprocess.Popen[bytes]], result: Path, *, needed: subprocess.Popen[bytes] | None = None
) -> Found:
    """Until all have ended, or one has failed: then the others wait for it in vain. So too once `needed` has ended."""
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() not in (None, 0) for child in children):
                break
            if needed is not None and needed.poll() is not None:
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


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """A process with children of its own, in a group of its own."""
    leader.terminate()
    with suppress(subprocess.TimeoutExpired):
        leader.wait(_SERVER_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
