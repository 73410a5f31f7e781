"""Which layout of arm 9 learns fastest, from looks at the speed of several: `N x places` searchers.

    steps a second x (1 - cost of a step of staleness x mean staleness)

What stale data costs comes from the runs of 2026-11-28: eta .70 at a mean staleness of 4.3 steps.

PYTHONPATH=workloads:tests python tests/bench/gpu/choose_layout.py --runs RUNS.jsonl --start DIGEST -o FILE
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.count_runs import SHARED, CountRun, read_runs

COST_OF_A_STEP = 0.07


def learning_speed(run: CountRun) -> float:
    """Steps a second that fresh data would need, roughly."""
    return run.steps_per_second * (1 - COST_OF_A_STEP * float(str(run.facts["mean staleness"])))


def best(runs: Sequence[CountRun], start: str) -> CountRun | None:
    """Of the looks from these weights; None if there is none."""
    looks = [r for r in runs if r.arm == SHARED and r.start == start and r.variant.startswith("speed")]
    return max(looks, key=learning_speed, default=None)


def main() -> None:
    """Write the layout, as `bench_count.py --searchers` takes it; nothing if there was no look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--start", required=True, help="digest of the weights, as made.json has it")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    runs = read_runs(options.runs)
    for run in runs:
        if run.start == options.start and run.arm == SHARED:
            print(
                f"{run.variant}: {run.steps_per_second:.2f} steps/s, {run.facts['response tokens/s']:,.0f} tokens/s, "
                f"staleness {run.facts['mean staleness']:.2f}, trains {run.facts['train s/step']:.2f} s/step, "
                f"waits {run.facts['trainer waits for data']:.2f}, learning speed {learning_speed(run):.2f}"
            )
    if found := best(runs, options.start):
        options.output.write_text(str(found.facts["searchers"]))
        print(f"chosen: {found.facts['searchers']}")


if __name__ == "__main__":
    main()
