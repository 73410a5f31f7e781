"""Arms 1 and 2: a rank of the synchronous loop in a process of its own. Started by bench_count.py and bench_lag.py."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from bench.gpu.average import Ranks
from bench.gpu.busy import Busy
from bench.gpu.grading import SLOW
from bench.gpu.sync_loop import SyncLoop

from tba.cli.jobfile import load_job


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--lag", type=int, default=0, help="steps between a batch's weights and its use")
    parser.add_argument("--engines", type=int, default=1, help="on each card")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cards", type=int, nargs="*", default=[], help="whose use is measured, as NVML counts them")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    job = load_job(options.job, options.settings)
    torch.manual_seed(job.spec.objective.seed)
    ranks = Ranks(
        options.rank, options.world, options.port, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    busy = Busy(options.cards) if options.rank == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        loop = SyncLoop(job, Path(folder), ranks, lag=options.lag, engines=options.engines)
        run = loop.run(
            seconds=options.seconds,
            max_steps=options.max_steps,
            evaluate_every=options.evaluate_every,
            tell=(lambda text: print(text, flush=True)) if options.rank == 0 else (lambda text: None),
        )
        ranks.wait()
        loop.engine.close()
    if busy is None:
        return
    busy.close()
    # A step that waits for its graders does not say what generating costs.
    costs = run.summary(options.world) if job.spec.task.reward.entrypoint != SLOW else None
    skip = len(run.steps) // 5 if len(run.steps) > 1 else 0  # every warm-up is there
    tokens = sum(c.tokens for c in run.costs[skip:])
    span = run.steps[-1][0] - (run.steps[skip - 1][0] if skip else 0.0)
    facts: dict[str, object] = {
        "response tokens/s": tokens / span,
        "peak GPU memory of torch, GB": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0,
        # Evaluations are in it: they keep the card as busy as generation does.
        "GPU busy, %": busy.mean(0.0, float("inf")) or busy.problem or "no sample",
    }
    result = {
        "steps": run.steps,
        "held_out": [(p.step, p.seconds, p.score) for p in run.held_out],
        "costs": asdict(costs) if costs else None,
        "facts": facts,
    }
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
