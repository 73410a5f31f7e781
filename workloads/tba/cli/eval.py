"""`tba eval`: evaluate the weights of a step of a run, or any model directory."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tba.cli.target import Endpoint, Region, open_target
from tba.contracts.errors import UserError


def command(
    target: Annotated[str, typer.Argument(help="A run (URI, runs/NAME, job file) or a model directory.")],
    version: Annotated[
        int | None, typer.Option("--step", "--version", min=0, help="Step of the weights; default the newest.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines or Parquet; default the run's own evaluation prompts.")
    ] = None,
    prompt_field: Annotated[
        str | None, typer.Option(help="Column of --prompts with the prompt; default the run's own, else question.")
    ] = None,
    answer_field: Annotated[
        str | None,
        typer.Option(
            help="Column of --prompts with the answer, '' if there is none; default the run's own, else answer."
        ),
    ] = None,
    reward: Annotated[str | None, typer.Option(help="Built-in reward; default the run's own.")] = None,
    sampling: Annotated[Literal["greedy", "sample"] | None, typer.Option(help="Default the run's own.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses a prompt, with --sampling sample.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="Default the run's own.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Response tokens; default the run's own.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(help="Of computation; default the run's own, of a model directory float32 on CPU, else bfloat16."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Print pass@1, and pass@k with k samples, each prompt once, with a standard error over prompts."""
    from tba.interpreter import loading

    with loading("torch"):
        from tba.cli import evaluate

    choice = evaluate.Choice(
        prompts=prompts, prompt_field=prompt_field, answer_field=answer_field, reward=reward, sampling=sampling,
        samples=samples, temperature=temperature, max_tokens=max_tokens, dtype=dtype, limit=limit, seed=seed,
    )  # fmt: skip
    if (Path(target) / "config.json").is_file():
        if version is not None:
            raise UserError(f"--step names weights of a run, and {target} is a model directory: leave it out")
        result = evaluate.of_directory(Path(target), choice)
    else:
        result = evaluate.of_run(open_target(target, endpoint=endpoint, region=region), version, choice)
    typer.echo(json.dumps(result.to_dict()) if as_json else result.describe())
