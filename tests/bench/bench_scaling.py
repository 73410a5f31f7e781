"""The autoscaler in a closed loop: how soon it is right, how calm it stays, what it would be without its precautions.

    python tests/bench/bench_scaling.py [-o docs/results/scaling.json]

A simulated run (tests/support/scaling_run.py): samples every 10 s that are off by up to 20 %, pods that deliver
5 minutes after they are asked for. The baseline applies the bare formula to each sample as it comes.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("operator", "workloads", "tests")]

from results import Row, record, table, write  # noqa: E402
from support.scaling_run import (  # noqa: E402
    ROWS,
    TICK_SECONDS,
    Load,
    ScalingRun,
    autoscaling,
    settled_after,
    turns,
)

from tba_operator.world import ScalingMemory  # noqa: E402

HOUR = 3600.0
START_SECONDS = 300.0
RATE = 2.0
SEEDS = range(20)
COMMAND = "python tests/bench/bench_scaling.py"


@dataclass(frozen=True)
class Case:
    """A load that changes after an hour."""

    name: str
    before: Load
    after: Load
    replicas: int


def load(needed: float, rate: float = RATE) -> Load:
    """For which `needed` searchers of RATE would be right."""
    return Load(needed * RATE / ROWS, rate)


CASES = (
    Case("trainer twice as fast", load(6), load(12), 6),
    Case("trainer half as fast", load(12), load(6), 12),
    Case("responses twice as long", load(6), load(6, RATE / 2), 6),
    Case("trainer ten times as fast", load(5), load(50), 5),
    Case("trainer ten times as slow", load(50), load(5), 50),
)


def bare(policy, replicas, memory, sample, *, job, ready, now) -> ScalingMemory:
    """The formula without warm-up, smoothing, window and dead band."""
    memory = memory or ScalingMemory(replicas, replicas)
    progress = sample.progress
    steps, rate = progress.steps_per_busy_second, progress.trajectories_per_searcher_second
    if not steps or not rate:
        return memory
    needed = math.ceil(steps * ROWS / policy.target_replay_ratio / rate)
    return replace(memory, desired=max(policy.min_replicas, min(needed, policy.max_replicas)))


def run(case: Case, seed: int, decider: Callable[..., ScalingMemory] | None = None, **options) -> ScalingRun:
    """Three hours of a case."""
    policy = autoscaling()
    extra = {} if decider is None else {"decider": decider}
    at = lambda now: case.before if now <= HOUR else case.after  # noqa: E731
    made = ScalingRun(at, policy, replicas=case.replicas, noise=0.2, seed=seed, **extra, **options)
    return made.run(3 * HOUR)


def late(series: list[int], since: float = HOUR) -> list[int]:
    """After the change of load, or later."""
    return series[int(since / TICK_SECONDS) :]


def settled(series: list[int], needed: float) -> float:
    """Seconds; the length of the series if never."""
    after = settled_after(series, needed)
    return len(series) * TICK_SECONDS if after is None else after


def measure() -> list[Row]:
    """Rows of every case."""
    rows = []
    for case in CASES:
        needed = case.after.needed(autoscaling())
        runs = [run(case, seed) for seed in SEEDS]
        for what, series in (("decided", "desired"), ("delivering", "started")):
            found = [settled(late(getattr(one, series)), needed) for one in runs]
            rows.append(
                record(
                    "scale", "scaling", f"{case.name}: {what}", median(found), "s", target=f"<= {2 * START_SECONDS:g}",
                    runs=found, seeds=list(SEEDS), command=COMMAND, note="after the change; pods start in 300 s",
                )
            )  # fmt: skip
        rows.append(calm(case, runs))
    return [*rows, cold(), slow_averages()]


def calm(case: Case, runs: list[ScalingRun]) -> Row:
    """Changes of direction in the second hour after a change, beside the bare formula's."""
    counts = [turns(late(one.desired, 2 * HOUR)) for one in runs]
    naive = [turns(late(run(case, seed, bare).desired, 2 * HOUR)) for seed in SEEDS]
    return record(
        "scale", "scaling", f"{case.name}: turns an hour, settled", sum(counts) / len(counts), "turns",
        baseline=("bare formula", sum(naive) / len(naive)), target="<= 0.05", runs=counts, seeds=list(SEEDS),
        command=COMMAND,
    )  # fmt: skip


def cold() -> Row:
    """From one searcher to twelve at the start of a job."""
    case = Case("cold start", load(12), load(12), 1)
    found = [settled(run(case, seed).desired, 12) for seed in SEEDS]
    return record(
        "scale", "scaling", "cold start from 1 to 12: decided", median(found), "s",
        target=f"<= {START_SECONDS + 2 * START_SECONDS:g}", runs=found, seeds=list(SEEDS), command=COMMAND,
        note="from the creation of the job; the first rows come after 300 s",
    )  # fmt: skip


def slow_averages() -> Row:
    """With averages of the trainer over five minutes."""
    case = CASES[1]
    found = [settled(late(run(case, s, window_seconds=300.0).desired), 6) for s in SEEDS]
    return record(
        "scale", "scaling", f"{case.name}: decided, averages over 300 s", median(found), "s", runs=found,
        seeds=list(SEEDS), command=COMMAND, note="what a longer window of the trainer costs",
    )  # fmt: skip


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    rows = measure()
    print(table(rows))
    if arguments.out:
        write(rows, arguments.out)


if __name__ == "__main__":
    main()
