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
            envvar="TBA_TRAINER_RANKS", min=1, help="Processes that train together on a node, each on a GPU of its own."
        ),
    ] = 1,
    nodes: Annotated[
        int, typer.Option(envvar="TBA_TRAINER_NODES", min=1, help="Nodes whose ranks train together.")
    ] = 1,
    node_rank: Annotated[
        int, typer.Option(envvar="TBA_TRAINER_NODE_RANK", min=0, help="Which of them this is; 0 is the trainer.")
    ] = 0,
    rendezvous: Annotated[
        str,
        typer.Option(
            envvar="TBA_RENDEZVOUS",
            metavar="HOST:PORT",
            help="Where node 0 listens; all nodes need the same TBA_RENDEZVOUS_TOKEN too.",
        ),
    ] = "",
    rendezvous_seconds: Annotated[
        float, typer.Option(envvar="TBA_RENDEZVOUS_SECONDS", min=0, help="How long nodes wait for each other.")
    ] = 1800.0,
) -> int:
    """Learn from what searchers put into the bucket; resume if it holds a run."""
    from tba.interpreter import loading

    with loading("torch"):
        from tba.trainer.main import TrainerOptions, run_trainer

    return run_trainer(
        TrainerOptions(
            config_dir=config,
            storage=storage,
            port=port,
            threads=threads,
            grace_seconds=grace_seconds,
            ranks=ranks,
            nodes=nodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            rendezvous_seconds=rendezvous_seconds,
        )
    )
