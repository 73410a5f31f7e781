"""`tba replay`: train again offline from the trajectories in the bucket."""

from pathlib import Path
from typing import Annotated

import typer

from tba.cli.target import Endpoint, Region, Target, open_target


def command(
    run: Target,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; default and most: up to the newest checkpoint.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the trained weights as a model directory.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads, as of the run's trainer.")] = 1,
    endpoint: Endpoint = None,
    region: Region = None,
) -> int:
    """Train from version 0 over the recorded shards in recorded order, and compare with the newest checkpoint.

    Of a run whose trainer was one process on a CPU with as many threads the weights are equal bit for bit. Exit code 1
    if they differ.
    """
    from tba.interpreter import loading

    with loading("torch"):
        import numpy as np
        import torch

        from tba.cli.model_directory import newest_assets, write_directory
        from tba.trainer.learner import Learner, StepResult
        from tba.trainer.replay import replay, weights_that_differ

    torch.set_num_threads(threads)
    store = open_target(run, endpoint=endpoint, region=region)

    def tell(learner: Learner, result: StepResult) -> None:
        if learner.step % 10 == 0:
            reward = np.average(result.rewards, weights=result.plan.weights)
            typer.echo(f"step {learner.step}: loss {result.loss:.6g}, reward {reward:.4g}", err=True)

    learner = replay(store, steps=steps, on_step=tell)
    if output is not None:
        write_directory(learner.policy.stage(), newest_assets(store), output)
    differing = weights_that_differ(store, learner)
    if differing is None:
        typer.echo(f"replayed {learner.step} steps; the newest checkpoint is of another step: nothing to compare")
        return 0
    verdict = "equal bit for bit" if not differing else f"differ in {len(differing)} tensors, first {differing[0]}"
    typer.echo(f"replayed {learner.step} steps; weights and checkpoint {verdict}")
    if differing:
        typer.echo("that is expected of a trainer on GPUs, of several ranks, or with other --threads than the run's")
    return int(bool(differing))
