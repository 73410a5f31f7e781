"""`tba export`: the weights of a step as a model directory that transformers and vLLM load."""

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
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with model.lora: the adapter alone, as PEFT loads it.")
    ] = False,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Write weights, configuration and tokenizer of a step, every byte verified.

    They come from its snapshot or, if that was swept, from its checkpoint. An adapter is merged into its base.
    """
    from tba.contracts.errors import UserError
    from tba.contracts.keys import CHECKPOINTS
    from tba.interpreter import loading

    with loading("torch"):
        from tba.cli.model_directory import export_adapter, read_snapshot, write_directory

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} is a file or not empty: name a new directory")
    store = open_target(run, endpoint=endpoint, region=region)
    if adapter:
        step = export_adapter(store, version, output)
        typer.echo(f"wrote the adapter of version {step} to {output}; it goes on the weights of version 0")
        return
    snapshot = read_snapshot(store, version)
    write_directory(snapshot.tensors, snapshot.assets, output)
    manifest, size = snapshot.manifest, sum(t.nbytes for t in snapshot.tensors.values())
    source = "checkpoint" if snapshot.key.startswith(CHECKPOINTS) else "snapshot"
    typer.echo(
        f"wrote version {manifest.version} (epoch {manifest.epoch}, {size} bytes, from its {source}) to {output}"
    )
