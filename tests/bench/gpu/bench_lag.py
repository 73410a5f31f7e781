"""What stale data costs, in steps: the synchronous loop with every batch used exactly LAG steps late.

    cell 0                     the loop as it is
    cell 4                     every batch four steps old
    cell 8:baselineShift=0.1,objective.beta=0.02      parameters of the objective, or any path

    --task count         a 135 M model on a GPU; asynchronous runs of bench_count.py stand beside
    --task arithmetic    the laptop example's 0.8 M model on a CPU, twenty seconds a run

Cells run side by side on one card, which slows them and changes nothing of what is reported: steps, not seconds.

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_lag.py --start FOLDER --cells 0 4 4:baselineShift=0.1
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_lag.py --task arithmetic --start examples/arithmetic/build ...
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_lag.py --rehearse     (a minute, on a CPU)
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_lag.py --table        (rows from the runs so far)

Runs are appended to docs/results/gpu_lag.jsonl (arithmetic: staleness.jsonl); one that is there is not repeated. Rows:
the same name with .json.
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

from bench.gpu.bench_count import REHEARSAL, cards_of, job_settings, start_of
from bench.gpu.count_runs import ASYNCHRONOUS, GRPO, CountRun, append_row, newest_first
from bench.gpu.count_runs import read_runs as read_count_runs
from bench.gpu.curves import THRESHOLDS, Point, eta, reach
from bench.gpu.places import JOB, ROOT, end_children_too, tiny_start
from bench.results import Place, Row, machine, own_command, record, table, write

RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True, slots=True)
class LagTask:
    """What is learned."""

    job: Path
    results: str
    """Name of its files in docs/results."""
    thresholds: tuple[float, ...]
    target: str | None
    """Of eta; none of a study that only compares."""


TASKS = {
    "count": LagTask(JOB, "gpu_lag", THRESHOLDS, ">= 0.77"),
    "arithmetic": LagTask(ROOT / "examples" / "laptop.yaml", "staleness", (0.7, 0.8, 0.9), None),
}


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
    start: str = ""
    """Digest of the weights that it began with, where the example writes one down; of the first sittings not taken."""

    @property
    def points(self) -> list[Point]:
        """The curve, without seconds."""
        return [Point(step, 0.0, score) for step, score in self.held_out]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="count")
    parser.add_argument("--start", type=Path, help="what the example's make_start.py or make_base.py made")
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
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--count-runs", type=Path, default=RESULTS / "gpu_count.jsonl", help="of bench_count.py")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with a tiny model; writes nothing here")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    end_children_too()
    task = TASKS[options.task]
    options.runs = options.runs or RESULTS / f"{task.results}.jsonl"
    options.output = options.output or RESULTS / f"{task.results}.json"
    with tempfile.TemporaryDirectory() as folder:
        if options.task == "count":
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
        others = asynchronous(options.count_runs) if options.task == "count" else []
        rows = judge(read_runs(options.runs), others, task=task)
        print(table(rows))
        write(rows, options.output)


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Every cell with every seed that is not there yet, some at a time."""
    begun = start_of(options.start) if options.task == "count" else ""
    done = {(run.cell, run.seed, run.start) for run in read_runs(options.runs)}
    waiting = [(c, s) for s in options.seeds for c in options.cells if (c, s, begun) not in done]
    running: list[tuple[str, int, Path, subprocess.Popen[bytes]]] = []
    try:
        while waiting or running:
            while waiting and len(running) < options.together:
                cell, seed = waiting.pop(0)
                result = folder / f"{time.monotonic_ns()}.json"
                running.append((cell, seed, result, start(options, cell, seed, result)))
            for one in [r for r in running if r[3].poll() is not None]:
                running.remove(one)
                keep(options, *one[:3], begun)
            time.sleep(0.2)
    finally:
        for *_, child in running:
            child.kill()
            child.wait()


def start(options: argparse.Namespace, cell: str, seed: int, result: Path) -> subprocess.Popen[bytes]:
    """The loop of one cell, as a process."""
    lag, changes = parse_cell(cell)
    argv = [sys.executable, "-m", "bench.gpu.arm_sync", "--job", str(TASKS[options.task].job)]
    argv += ["--result", str(result), "--lag", str(lag)]
    argv += ["--seconds", str(options.seconds), "--max-steps", str(options.steps)]
    argv += ["--evaluate-every", str(options.evaluate_every)]
    for setting in settings_of(options, seed) + changes:
        argv += ["--set", setting]
    print(f"== {cell}, seed {seed}: started", flush=True)
    log = result.with_suffix(".log").open("wb")
    return subprocess.Popen(argv, env={**os.environ, "CUDA_VISIBLE_DEVICES": options.gpu}, stdout=log, stderr=log)


def settings_of(options: argparse.Namespace, seed: int) -> list[str]:
    """Overrides of the task's job; what the user sets comes last and wins."""
    options.max_steps = options.steps
    if options.task == "count":
        # A cell has the parameters that it names, whatever the example's are.
        return [*job_settings(options, 1, seed), "objective.parameters={}"]
    folder = options.start.resolve()
    return [
        f"model.uri=file://{folder / 'base'}",
        f"task.prompts.uri=file://{folder / 'train.jsonl'}",
        f"task.evaluation.prompts.uri=file://{folder / 'test.jsonl'}",
        f"objective.seed={seed}",
        f"objective.totalSteps={options.steps}",
        *options.settings,
    ]


def parse_cell(cell: str) -> tuple[int, list[str]]:
    """(lag, settings). Raises: SystemExit with what a cell looks like."""
    lag, _, changes = cell.partition(":")
    pairs = [change.partition("=") for change in changes.split(",") if change]
    if not lag.isdigit() or not all(name and value for name, _, value in pairs):
        raise SystemExit(f"a cell is LAG or LAG:NAME=VALUE,NAME=VALUE such as 4:baselineShift=0.1, got {cell!r}")
    return int(lag), [f"{n if '.' in n else f'objective.parameters.{n}'}={v}" for n, _, v in pairs]


def keep(options: argparse.Namespace, cell: str, seed: int, result: Path, begun: str) -> None:
    """Append what a process left, or tell what it said at its end."""
    if not result.exists():
        print(f"== {cell}, seed {seed}: failed: {result.with_suffix('.log').read_text(errors='replace')[-1500:]}")
        return
    found = json.loads(result.read_text())
    held_out = [(step, score) for step, _, score in found["held_out"]]
    rewards = [round(reward, 4) for _, reward in found["steps"]]
    command = own_command().replace("PYTHONPATH=workloads ", "PYTHONPATH=workloads:tests ")
    date = datetime.now(UTC).date().isoformat()
    run = LagRun(cell, seed, rewards, held_out, machine() + cards_of(), date, command, begun)
    append_row(options.runs, asdict(run))
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
    found = [run for run in read_count_runs(path) if run.arm in arms and run.task == "count" and run.held_out]
    kinds = dict.fromkeys(map(_kind, found))
    lags = {k: statistics.mean(float(str(r.facts["mean staleness"])) for r in found if _kind(r) == k) for k in kinds}
    return [
        LagRun(
            cell=f"arm {run.arm}, mean lag {lags[_kind(run)]:.1f} ({run.variant or 'as it is'})",
            seed=run.seed,
            rewards=[reward for _, reward in run.steps],
            held_out=[(step, score) for step, _, score in run.held_out],
            machine=run.machine,
            date=run.date,
            command=run.command,
            start=run.start,
        )
        for run in found
    ]


def _kind(run: CountRun) -> tuple[int, str, str]:
    return run.arm, run.variant, run.start


def judge(runs: Sequence[LagRun], others: Sequence[LagRun] = (), *, task: LagTask = TASKS["count"]) -> list[Row]:
    """A cell's median steps to each threshold with eta, and its score at the last evaluation that all have.

    Only runs from the same weights are compared.
    """
    cells: dict[tuple[str, str], list[LagRun]] = {}
    newest = newest_first([run.start for run in runs])
    for run in (
        *sorted(runs, key=lambda r: (newest[r.start], int(r.cell.partition(":")[0]), len(r.cell), r.cell, r.seed)),
        *others,
    ):
        cells.setdefault((run.cell, run.start), []).append(run)
    rows: list[Row] = []
    for (name, begun), found in cells.items():
        cell = f"{name} (start {begun})" if begun else name
        plain = [] if name == fresh(name) else cells.get((fresh(name), begun), [])
        for threshold in task.thresholds:
            rows += _threshold(task, cell, found, plain, threshold)
        last = min(run.held_out[-1][0] for run in found)
        ends = [dict(run.held_out)[last] for run in found]
        place = _place(found[0], "held out at the end, pass@1", beside=f"at step {last}")
        metric = f"{cell}: held out at step {last}"
        rows.append(_row(task, found, metric, statistics.median(ends), "pass@1", ends, "", place))
    return rows


def fresh(cell: str) -> str:
    """The cell without lag that it is held against: of the same rate and beta, without what stale data needs."""
    _, _, changes = cell.partition(":")
    kept = ",".join(c for c in changes.split(",") if c.startswith("objective."))
    return f"0:{kept}" if kept else "0"


def _threshold(task: LagTask, cell: str, runs: list[LagRun], plain: list[LagRun], threshold: float) -> list[Row]:
    steps = [at[0] for run in runs if (at := reach(run.points, threshold))]
    if not steps:
        return []
    note = f"{len(steps)} of {len(runs)} reached it"
    place = _place(runs[0], f"steps to {threshold:g}")
    metric = f"{cell}: steps to {threshold:g}"
    rows = [_row(task, runs, metric, statistics.median(steps), "steps", steps, note, place)]
    theirs = [at[0] for run in plain if (at := reach(run.points, threshold))]
    if theirs:
        value = eta(statistics.median(theirs), statistics.median(steps))
        metric = f"{cell}: eta at {threshold:g}"
        place = _place(runs[0], "eta", label=f"to {threshold:g}")
        rows.append(_row(task, runs, metric, value, "steps/steps", None, "", place, target=task.target))
    return rows


def _place(run: LagRun, column: str, label: str = "", beside: str = "") -> Place:
    """A table holds what may be compared: all cells of a rate and beta, with their fresh data."""
    lag, _, changes = run.cell.partition(":")
    changed = ", ".join(c for c in changes.split(",") if c and not c.startswith("objective."))
    subject = {"lag": lag, "objective": changed or "as it is"} if lag.isdigit() else {"lag": run.cell}
    common = fresh(run.cell).partition(":")[2].replace("objective.", "").replace(",", ", ")
    goal = f"{column} at lag {lag}"
    return Place(subject, column, table=common, start=run.start, label=label, beside=beside, goal=goal)


def _row(
    task: LagTask,
    runs: list[LagRun],
    metric: str,
    value: float,
    unit: str,
    values: list[float] | None,
    note: str,
    place: Place,
    target: str | None = None,
) -> Row:
    seeds = [run.seed for run in runs]
    made = record(
        "science",
        task.results,
        metric,
        value,
        unit,
        runs=values,
        seeds=seeds,
        command=runs[-1].command,
        target=target,
        note=note,
        place=place,
    )
    return replace(made, machine=runs[-1].machine, date=runs[-1].date)  # measured there and then


if __name__ == "__main__":
    main()
