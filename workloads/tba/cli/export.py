"""`tba export`: a snapshot as a model directory that transformers and vLLM load."""

from pathlib import Path
from typing import Annotated

import typer

from tba.cli.target import Endpoint, Region, Target, open_target


def command(
    run: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to make.")],
    version: Annotated[
        int | None, typer.Option("--step", "--version", min=0, help="Step of the weights; default the newest.")
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Write weights, configuration and tokenizer of a snapshot, every byte verified."""
    from tba.cli.model_directory import read_snapshot, write_directory
    from tba.contracts.errors import UserError

    if output.exists() and any(output.iterdir()):
        raise UserError(f"--output {output} is not empty: name a new directory")
    snapshot = read_snapshot(open_target(run, endpoint=endpoint, region=region), version)
    write_directory(snapshot.tensors, snapshot.assets, output)
    manifest = snapshot.manifest
    typer.echo(f"wrote version {manifest.version} (epoch {manifest.epoch}, {manifest.total_bytes} bytes) to {output}")
