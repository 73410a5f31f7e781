"""`tba metrics`: the history of a run as CSV or JSON lines, from its bucket alone."""

import io
from pathlib import Path
from typing import Annotated, Literal

import typer

from tba.cli.output import writing_to
from tba.cli.target import Endpoint, Region, Target, open_target
from tba.report.series import Kind


def command(
    run: Target,
    kind: Annotated[Kind, typer.Option("--kind", "-k", help="Rows of this kind.")] = "step",
    form: Annotated[
        Literal["csv", "jsonl"] | None,
        typer.Option("--format", "-f", help="Default: by the ending of --output, else csv."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; - for standard output.")] = Path("-"),
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Write one row a step, or of another kind, for pandas, DuckDB or a spreadsheet.

    Rows of steps that were lost at a resume are left out.
    """
    from tba.report.history import read_history
    from tba.report.series import rows_of, write_csv, write_jsonl
    from tba.run_record import read_run_record

    store = open_target(run, endpoint=endpoint, region=region)
    read_run_record(store)  # an empty table must not stand for a wrong address
    rows = rows_of(read_history(store), kind)
    text = io.StringIO()
    lines = form == "jsonl" or (form is None and output.suffix in (".jsonl", ".ndjson"))
    (write_jsonl if lines else write_csv)(rows, text)
    if not rows:
        typer.echo(f"the run has no rows of kind {kind} yet", err=True)
    if str(output) == "-":
        typer.echo(text.getvalue().encode(), nl=False)
        return
    with writing_to(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text.getvalue(), encoding="utf-8")
    typer.echo(f"wrote {output}: {len(rows)} rows")
