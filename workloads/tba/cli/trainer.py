"""`tba trainer`: container entry point of the trainer."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    config: Annotated[Path, typer.Option(envvar="TBA_CONFIG", help="Directory with run.json and live.json.")],
    storage: Annotated[
        str | None, typer.Option(envvar="TBA_STORAGE", help="Storage URI of the run; default the job's own.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(envvar="TBA_PORT", help="Of /metrics, /healthz, /readyz, /progress, /; default none.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; default OMP_NUM_THREADS.")] = None,
    grace_seconds: Annotated[
        float, typer.Option(envvar="TBA_GRACE_SECONDS", min=0, help="From SIGTERM until this process is killed.")
    ] = 600.0,
    ranks: Annotated[
        int,
        typer.Option(
            envvar="TBA_TRAINER_RANKS", min=1, help="Processes that train together, each on a GPU of its own."
        ),
    ] = 1,
) -> int:
    """Learn from what searchers put into the bucket; resume if it holds a run."""
    from tba.trainer.main import TrainerOptions, run_trainer

    return run_trainer(
        TrainerOptions(
            config_dir=config, storage=storage, port=port, threads=threads, grace_seconds=grace_seconds, ranks=ranks
        )
    )
