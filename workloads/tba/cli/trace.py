"""`tba trace`: one file from the timelines that the processes of a run have written."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tba.cli.output import writing_to


def command(
    directory: Annotated[Path, typer.Argument(help="Where `tba run --trace DIR` or TBA_TRACE put the timelines.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("trace.json"),
) -> None:
    """Merge timelines, also of processes that run or were killed, into one file for https://ui.perfetto.dev."""
    from tba.contracts.errors import UserError
    from tba.trace import SUFFIX, merge

    paths = sorted(directory.glob(f"*{SUFFIX}"))
    if not paths:
        raise UserError(f"{directory} holds no *{SUFFIX}: run with `tba run --trace {directory}`, or set TBA_TRACE")
    events = merge(paths)
    with writing_to(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    typer.echo(f"wrote {output}: {len(events)} events of {len(paths)} processes")
