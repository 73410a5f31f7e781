"""Arms 5 to 9: the real processes of `tba run`, each on its own card, and their snapshots scored afterwards.

start trainer (GPU 0) and searcher (GPU 1) ─► clock starts when the searcher has weights ─► SIGTERM ─► history
                                                   └─► score_snapshots (own process): every tenth version
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.busy import Busy
from bench.gpu.places import in_child

from tba.cli.jobfile import load_job
from tba.cli.local_plan import plan
from tba.cli.local_run import free_port
from tba.contracts.history import StepRow
from tba.contracts.keys import MANIFEST, WEIGHTS, WeightsKey
from tba.contracts.runfile import write_config
from tba.log import MODEL_LOADED, POLICY_SWAPPED
from tba.report.history import History, read_history
from tba.store import open_store

_START_SECONDS = 240.0
_STOP_SECONDS = 60.0


@dataclass(slots=True)
class Played:
    """What the processes left."""

    history: History
    started: float
    """Unix time at which the searcher had its first weights."""
    ended: float
    busy: object
    uri: str
    async_scheduling: dict[str, str]
    """By process, what its engine says of it when it has its model; other engines than vLLM say nothing."""


def play(
    job_file: Path, settings: list[str], run_dir: Path, *, seconds: float, gpus: list[str], trainer: str = "tba"
) -> Played:
    """Run trainer and searchers for `seconds` after the first weights arrived, or until the run is complete.

    `gpus`: of the trainer, then of each searcher in turn; "" hides all of them. `trainer`: the module of its command.
    Raises: RuntimeError with the end of a log if a process dies or none gets weights.
    """
    planned = plan(
        job_file,
        overrides=settings,
        searchers=None,
        storage="local",
        run_dir=run_dir,
        fresh=True,
        can_run_vllm=lambda: True,  # another engine in its place would be another arm
    )
    write_config(planned.config_directory, planned.job, base_dir=str(job_file.resolve().parent))
    port = free_port()
    first, _ = replace(planned, command=(sys.executable, "-m", trainer)).programs(port=port, environment={})
    _, searchers = planned.programs(port=port, environment={})
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    busy = Busy(sorted({int(g) for g in gpus if g}))
    for i, program in enumerate((first, *searchers)):
        program.log.parent.mkdir(parents=True, exist_ok=True)
        card = {"CUDA_VISIBLE_DEVICES": gpus[min(i, len(gpus) - 1)]}
        with program.log.open("ab") as log:
            child = subprocess.Popen(
                list(program.argv), env={**os.environ, **program.env, **card}, stdout=log, stderr=log
            )
        running.append((child, program.log))
    try:
        started = _await_weights(running)
        deadline = started + seconds
        while time.time() < deadline and running[0][0].poll() is None:
            _refuse_dead(running[1:])
            time.sleep(0.1)
        ended = time.time()
        if running[0][0].poll() not in (None, 0):
            raise RuntimeError(_tail("the trainer ended", running[0][1]))
    finally:
        _stop(running)
        busy.close()
    return Played(
        read_history(open_store(planned.storage.uri)),
        started,
        ended,
        busy.mean(started, ended) or busy.problem,
        planned.storage.uri,
        {log.stem: told for log in sorted((run_dir / "logs").glob("*.log")) if (told := async_scheduling(log))},
    )


def _await_weights(running: list[tuple[subprocess.Popen[bytes], Path]]) -> float:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        for line in running[1][1].read_text(errors="replace").splitlines():
            if POLICY_SWAPPED in line:
                return time.time()
        _refuse_dead(running)
        time.sleep(0.05)
    raise RuntimeError(_tail(f"no weights at the searcher in {_START_SECONDS:.0f} s", running[1][1]))


def _refuse_dead(running: list[tuple[subprocess.Popen[bytes], Path]]) -> None:
    for child, log in running:
        if child.poll() not in (None, 0):
            raise RuntimeError(_tail(f"a process ended with {child.returncode}", log))


def _tail(what: str, log: Path) -> str:
    return f"{what}: {log.read_text(errors='replace')[-3000:]}"


def async_scheduling(log: Path) -> str:
    """`true` or `false`, from the line that a searcher logs once vLLM has started; nothing if there is none."""
    for line in log.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found = json.loads(line) if MODEL_LOADED in line else {}
            if found.get("event") == MODEL_LOADED and "async_scheduling" in found:
                return json.dumps(found["async_scheduling"])
    return ""


def _stop(running: list[tuple[subprocess.Popen[bytes], Path]]) -> None:
    for child, _ in running:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for child, _ in running:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def score_snapshots(job_file: Path, settings: list[str], uri: str, *, every: int, gpu: str) -> dict[int, float]:
    """Step -> held-out score, in a process of its own, whose end frees the card. `every` 0: nothing."""
    if not every:
        return {}
    argv = ["-m", "bench.gpu.arm_async", "--score", uri, "--job", str(job_file), "--every", str(every)]
    for setting in settings:
        argv += ["--set", setting]
    found = in_child(argv, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu})
    return {int(step): score for step, score in found.items()}


def _score(job_file: Path, settings: list[str], uri: str, every: int) -> dict[int, float]:
    from bench.gpu import held_out
    from bench.gpu.grading import judge
    from bench.gpu.sync_loop import load_prompts

    from tba.models import load_model
    from tba.searcher.engines import build
    from tba.snapshots import SnapshotFetcher

    spec = load_job(job_file, settings).spec
    config = spec.run_config()
    tokenizer = load_model(config.model, base_dir=Path(".")).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        evaluation = config.task.evaluation
        prompts = load_prompts(evaluation.prompts, tokenizer, config, Path(folder), evaluation.max_prompts)
    store, fetch = open_store(uri), SnapshotFetcher()
    engine = build(spec.searcher.engine, model=config.model)
    reward = judge(config.task.reward)
    found: dict[int, float] = {}
    keys = (WeightsKey.parse(i.key) for i in store.list_after(WEIGHTS) if i.key.endswith(MANIFEST))
    for key in sorted(keys, key=lambda k: k.version):
        if key.version % every == 0:
            engine.load(fetch(store, key.path))
            total, count = held_out.score(engine, prompts, reward, config)
            found[key.version] = total / count
            print(f"held out at step {key.version}: {found[key.version]:.3f}", file=sys.stderr, flush=True)
    engine.close()
    return found


def outcome(played: Played, scores: dict[int, float]) -> dict[str, Any]:
    """Steps, curve and facts of a run."""
    history = played.history
    rows = [r for r in history.steps if r.time <= played.ended]
    if not rows:
        raise RuntimeError(f"no step in {played.ended - played.started:.0f} s: see the logs beside {played.uri}")
    at = {0: 0.0} | {r.step: r.time - played.started for r in rows}
    staleness: Counter[int] = Counter()
    for row in rows:
        staleness.update(row.staleness)
    # The first row's wait began before there was an engine.
    idle = sum(r.wait_data_seconds for r in rows[1:]) / max(1e-9, rows[-1].time - rows[0].time)
    published = [p for p in history.publishes if p.time <= played.ended]
    searcher = history.searchers[-1].stats if history.searchers else {}
    facts: dict[str, object] = {
        "response tokens/s": settled_rate(rows, played.started),
        "trainer waits for data": idle,
        "mean staleness": sum(k * n for k, n in staleness.items()) / max(1, sum(staleness.values())),
        "staleness histogram": " ".join(f"{k}:{n}" for k, n in sorted(staleness.items())),
        "rows trained / generated": rows[-1].trained_rows / max(1, rows[-1].ingested_rows),
        "train s/step": sum(r.train_seconds + r.score_seconds for r in rows) / len(rows),
        "bytes a publish, MB": sum(p.total_bytes for p in published) / max(1, len(published)) / 1e6,
        "searcher loads s": searcher.get("load_seconds", 0.0),
        "searcher waits s": sum(v for k, v in searcher.items() if k.startswith("wait_") and "idle" not in k),
        "GPU busy, %": played.busy or "no sample",
        "async_scheduling": ", ".join(f"{k}: {v}" for k, v in played.async_scheduling.items()) or "not told",
    }
    print(f"async_scheduling: {facts['async_scheduling']}", flush=True)
    return {
        "steps": [(r.time - played.started, r.reward_mean) for r in rows],
        "held_out": sorted((step, at[step], score) for step, score in scores.items() if step in at),
        "costs": None,
        "facts": facts,
    }


def settled_rate(rows: Sequence[StepRow], started: float) -> float:
    """Response tokens a second after the first fifth of the steps, in which searchers may still be starting."""
    skip = len(rows) // 5
    since, before = (rows[skip].time, rows[skip].generated_tokens) if len(rows) > 1 else (started, 0)
    return (rows[-1].generated_tokens - before) / max(1e-9, rows[-1].time - since)


def main() -> None:
    """The scoring process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--score", required=True)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    scores = _score(options.job, options.settings, options.score, options.every)
    options.result.write_text(json.dumps(scores))


if __name__ == "__main__":
    main()
