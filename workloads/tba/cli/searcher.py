"""`tba searcher`: container entry point of a searcher."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    storage: Annotated[str, typer.Option(envvar="TBA_STORAGE", help="Storage URI of the run.")],
    name: Annotated[str, typer.Option(envvar="TBA_NAME", help="Lower-case letters, digits, '-'.")],
    config: Annotated[
        Path | None,
        typer.Option(envvar="TBA_CONFIG", help="Directory with live.json; default: everything from the bucket."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(envvar="TBA_PORT", help="Of /metrics, /healthz, /readyz; default none.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; default OMP_NUM_THREADS.")] = None,
    grace_seconds: Annotated[
        float,
        typer.Option(
            envvar="TBA_GRACE_SECONDS", min=0, help="From SIGTERM until what is not uploaded yet stays in the spool."
        ),
    ] = 45.0,
    spool_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="TBA_SPOOL_DIR",
            help="Where finished shards wait for storage, also for a successor of this name; "
            "default a folder of the temporary directory.",
        ),
    ] = None,
    exit_when_done: Annotated[
        bool, typer.Option("--exit-when-done", help="End with 0 when the run has ended.")
    ] = False,
    gate_fd: Annotated[
        int | None, typer.Option(envvar="TBA_GATE_FD", hidden=True, help="Set by a trainer for its colocated searcher.")
    ] = None,
) -> int:
    """Generate and score responses with the newest weights; needs the bucket and nothing else."""
    from tba.searcher.main import SearcherOptions, run_searcher

    return run_searcher(
        SearcherOptions(
            storage=storage, name=name, config_dir=config, port=port, threads=threads, grace_seconds=grace_seconds,
            spool_dir=spool_dir, exit_when_done=exit_when_done, gate_fd=gate_fd,
        )
    )  # fmt: skip
