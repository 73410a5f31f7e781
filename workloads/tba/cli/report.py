"""`tba report`: one HTML page about a run, from its bucket alone."""

from pathlib import Path
from typing import Annotated

import typer

from tba.cli.output import writing_to
from tba.cli.target import Endpoint, Region, Target, open_target


def command(
    run: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; - for standard output.")] = Path(
        "report.html"
    ),
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Write one self-contained page: figures, evaluations, searchers, samples, quarantine, configuration."""
    from tba.report.page import build_report
    from tba.run_record import read_run_record

    store = open_target(run, endpoint=endpoint, region=region)
    read_run_record(store)  # an empty page must not stand for a wrong address
    page = build_report(store)
    if str(output) == "-":
        typer.echo(page.encode(), nl=False)  # bytes: the page says that it is UTF-8, whatever the locale is
        return
    with writing_to(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
    typer.echo(f"wrote {output}")
