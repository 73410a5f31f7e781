"""Rows as a table for people or as JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

import typer

Row = dict[str, Any]

_PIPE_WIDTH = 10_000


def show(rows: Sequence[Row], *, as_json: bool, title: str = "") -> None:
    """Print rows that share their keys; keys are the column heads, in JSON in camelCase."""
    if as_json:
        typer.echo(json.dumps([{_camel(name): value for name, value in row.items()} for row in rows]))
        return
    if not rows:
        typer.echo(f"{title}: none" if title else "none")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, header_style="dim", pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int | float) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_text(v)) for v in row.values()))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)  # grep and awk want a row on one line, however narrow `COLUMNS` is
    console.print(table)


def _camel(name: str) -> str:
    """`shards ingested` -> `shardsIngested`."""
    first, *rest = name.split()
    return first + "".join(word.capitalize() for word in rest)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
