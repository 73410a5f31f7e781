"""What stale data costs on `count`, in steps: the synchronous loop with every batch used exactly LAG steps late.

    cell 0                     the loop as it is
    cell 4                     every batch four steps old
    cell 8:baselineShift=0.1,objective.beta=0.02      parameters of the objective, or any path

Asynchronous runs of bench_count.py (arms 5 to 7) stand beside them: their lag is whatever it was.

Cells run side by side on one card, which slows them and changes nothing of what is reported: steps, not seconds.

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_lag.py --start FOLDER --cells 0 4 4:baselineShift=0.1
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_lag.py --rehearse     (a minute, on a CPU)
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_lag.py --table        (rows from the runs so far)

Runs are appended to docs/results/gpu_lag.jsonl; one that is there is not repeated. Rows: docs/results/gpu_lag.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu.bench_count import REHEARSAL, cards_of, job_settings
from bench.gpu.count_runs import ASYNCHRONOUS, GRPO
from bench.gpu.count_runs import read_runs as read_count_runs
from bench.gpu.curves import THRESHOLDS, Point, eta, reach
from bench.gpu.places import JOB, ROOT, tiny_start
from bench.results import Row, machine, own_command, record, table, write

RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True, slots=True)
class LagRun:
    """One cell with one seed."""

    cell: str
    seed: int
    rewards: list[float]
    """Mean of the batch generated in each step."""
    held_out: list[tuple[int, float]]
    """(step, score)"""
    machine: str
    date: str
    command: str

    @property
    def points(self) -> list[Point]:
        """The curve, without seconds."""
        return [Point(step, 0.0, score) for step, score in self.held_out]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="what examples/count/make_start.py made")
    parser.add_argument("--cells", nargs="+", default=["0", "4"], metavar="LAG[:NAME=VALUE,...]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=400.0, help="of a run at most, evaluations left out")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--together", type=int, default=4, help="runs at a time")
    parser.add_argument("--cache-gib", type=float, default=6.0, help="of each engine")
    parser.add_argument("--gpu", default="0")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="PATH=VALUE", help="in all cells"
    )
    parser.add_argument("--runs", type=Path, default=RESULTS / "gpu_lag.jsonl")
    parser.add_argument("--count-runs", type=Path, default=RESULTS / "gpu_count.jsonl", help="of bench_count.py")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with a tiny model; writes nothing here")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "gpu_lag.json")
    options = parser.parse_args()
    options.task = "count"
    with tempfile.TemporaryDirectory() as folder:
        cache = [f"searcher.engine.extraArgs.kv_cache_memory_bytes={int(options.cache_gib * 2**30)}"]
        options.settings = cache + options.settings
        if options.rehearse:
            options.start = tiny_start(Path(folder) / "start")
            options.settings, options.steps, options.evaluate_every, options.gpu = REHEARSAL, 4, 2, ""
            options.runs, options.output = Path(folder) / "runs.jsonl", Path(folder) / "rows.json"
        if not options.table:
            if options.start is None:
                parser.error("name --start")
            run_all(options, Path(folder))
        rows = judge(read_runs(options.runs), asynchronous(options.count_runs))
        print(table(rows))
        write(rows, options.output)


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Every cell with every seed that is not there yet, some at a time."""
    done = {(run.cell, run.seed) for run in read_runs(options.runs)}
    waiting = [(c, s) for s in options.seeds for c in options.cells if (c, s) not in done]
    running: list[tuple[str, int, Path, subprocess.Popen[bytes]]] = []
    try:
        while waiting or running:
            while waiting and len(running) < options.together:
                cell, seed = waiting.pop(0)
                result = folder / f"{time.monotonic_ns()}.json"
                running.append((cell, seed, result, start(options, cell, seed, result)))
            for one in [r for r in running if r[3].poll() is not None]:
                running.remove(one)
                keep(options, *one[:3])
            time.sleep(0.2)
    finally:
        for *_, child in running:
            child.kill()
            child.wait()


def start(options: argparse.Namespace, cell: str, seed: int, result: Path) -> subprocess.Popen[bytes]:
    """The loop of one cell, as a process."""
    lag, changes = parse_cell(cell)
    argv = [sys.executable, "-m", "bench.gpu.arm_sync", "--job", str(JOB), "--result", str(result), "--lag", str(lag)]
    argv += ["--seconds", str(options.seconds), "--max-steps", str(options.steps)]
    argv += ["--evaluate-every", str(options.evaluate_every)]
    options.max_steps = options.steps
    for setting in job_settings(options, 1, seed) + changes:
        argv += ["--set", setting]
    print(f"== {cell}, seed {seed}: started", flush=True)
    log = result.with_suffix(".log").open("wb")
    return subprocess.Popen(argv, env={**os.environ, "CUDA_VISIBLE_DEVICES": options.gpu}, stdout=log, stderr=log)


def parse_cell(cell: str) -> tuple[int, list[str]]:
    """(lag, settings). Raises: SystemExit with what a cell looks like."""
    lag, _, changes = cell.partition(":")
    pairs = [change.partition("=") for change in changes.split(",") if change]
    if not lag.isdigit() or not all(name and value for name, _, value in pairs):
        raise SystemExit(f"a cell is LAG or LAG:NAME=VALUE,NAME=VALUE such as 4:baselineShift=0.1, got {cell!r}")
    return int(lag), [f"{n if '.' in n else f'objective.parameters.{n}'}={v}" for n, _, v in pairs]


def keep(options: argparse.Namespace, cell: str, seed: int, result: Path) -> None:
    """Append what a process left, or tell what it said at its end."""
    if not result.exists():
        print(f"== {cell}, seed {seed}: failed: {result.with_suffix('.log').read_text(errors='replace')[-1500:]}")
        return
    found = json.loads(result.read_text())
    held_out = [(step, score) for step, _, score in found["held_out"]]
    rewards = [round(reward, 4) for _, reward in found["steps"]]
    command = own_command().replace("PYTHONPATH=workloads ", "PYTHONPATH=workloads:tests ")
    date = datetime.now(UTC).date().isoformat()
    run = LagRun(cell, seed, rewards, held_out, machine() + cards_of(), date, command)
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    with options.runs.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")
    curve = " ".join(f"{step}:{score:.3f}" for step, score in held_out)
    print(f"== {cell}, seed {seed}: {curve}; {len(rewards)} steps in {found['steps'][-1][0]:.0f} s", flush=True)


def read_runs(path: Path) -> list[LagRun]:
    """All runs of a file; none if there is no file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [LagRun(**{**row, "held_out": [tuple(p) for p in row["held_out"]]}) for row in rows]


def asynchronous(path: Path) -> list[LagRun]:
    """Arms 5 to 7 of bench_count.py, a cell for each variant; its mean staleness is told."""
    arms = set(ASYNCHRONOUS) - {GRPO}  # of which another objective says nothing
    found = [run for run in read_count_runs(path) if run.arm in arms and run.task == "count"]
    cells = dict.fromkeys(run.variant for run in found)
    lags = {v: statistics.mean(float(str(r.facts["mean staleness"])) for r in found if r.variant == v) for v in cells}
    return [
        LagRun(
            cell=f"asynchronous, mean lag {lags[run.variant]:.1f} ({run.variant or 'as it is'})",
            seed=run.seed,
            rewards=[reward for _, reward in run.steps],
            held_out=[(step, score) for step, _, score in run.held_out],
            machine=run.machine,
            date=run.date,
            command=run.command,
        )
        for run in found
    ]


def judge(runs: Sequence[LagRun], others: Sequence[LagRun] = ()) -> list[Row]:
    """A cell's median steps to each threshold with eta, and its score at the last evaluation that all have."""
    cells: dict[str, list[LagRun]] = {}
    for run in (*sorted(runs, key=lambda r: (int(r.cell.partition(":")[0]), r.cell, r.seed)), *others):
        cells.setdefault(run.cell, []).append(run)
    rows: list[Row] = []
    for cell, found in cells.items():
        for threshold in THRESHOLDS:
            rows += _threshold(cell, found, cells.get("0", []), threshold)
        last = min(run.held_out[-1][0] for run in found)
        ends = [dict(run.held_out)[last] for run in found]
        rows.append(_row(found, f"{cell}: held out at step {last}", statistics.median(ends), "pass@1", ends, ""))
    return rows


def _threshold(cell: str, runs: list[LagRun], plain: list[LagRun], threshold: float) -> list[Row]:
    steps = [at[0] for run in runs if (at := reach(run.points, threshold))]
    if not steps:
        return []
    note = f"{len(steps)} of {len(runs)} reached it"
    rows = [_row(runs, f"{cell}: steps to {threshold:g}", statistics.median(steps), "steps", steps, note)]
    theirs = [at[0] for run in plain if (at := reach(run.points, threshold))]
    if theirs and cell != "0":
        value = eta(statistics.median(theirs), statistics.median(steps))
        rows.append(_row(runs, f"{cell}: eta at {threshold:g}", value, "steps/steps", None, "", target=">= 0.77"))
    return rows


def _row(
    runs: list[LagRun],
    metric: str,
    value: float,
    unit: str,
    values: list[float] | None,
    note: str,
    target: str | None = None,
) -> Row:
    seeds = [run.seed for run in runs]
    made = record(
        "science",
        "gpu_lag",
        metric,
        value,
        unit,
        runs=values,
        seeds=seeds,
        command=runs[-1].command,
        target=target,
        note=note,
    )
    return replace(made, machine=runs[-1].machine, date=runs[-1].date)  # measured there and then


if __name__ == "__main__":
    main()
