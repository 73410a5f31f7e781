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
) -> int:
    """Generate and score responses with the newest weights; needs the bucket and nothing else."""
    from tba.searcher.main import SearcherOptions, run_searcher

    return run_searcher(SearcherOptions(storage=storage, name=name, config_dir=config, port=port, threads=threads))
