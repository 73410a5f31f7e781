"""The run history as flat rows, for tables and plotting tools of the user's own."""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Literal

from tba.contracts.history import AnyRow, Row
from tba.report.history import History
from tba.report.summary import weighted_mean

Kind = Literal["step", "eval", "publish", "searcher", "sample", "quarantine", "event"]
"""Of rows, as the history names them (docs/reference/metrics-and-events.md, "Run history")."""
Cell = str | float | bool | None
_COMMON = ("kind", "epoch", "step", "time")


def rows_of(history: History, kind: Kind) -> Sequence[AnyRow]:
    """All rows of a kind, without those of steps that were lost at a resume."""
    found: Mapping[Kind, Sequence[AnyRow]] = {
        "step": history.steps,
        "eval": history.evaluations,
        "publish": history.publishes,
        "searcher": history.searcher_rows,
        "sample": history.samples,
        "quarantine": history.quarantines,
        "event": history.events,
    }
    return found[kind]


def flat(row: Row) -> dict[str, Cell]:
    """Names as in the bucket. Of a histogram `nameMean` and `nameMax`, of other mappings `name.key` for each key."""
    cells: dict[str, Cell] = {}
    for name, value in row.model_dump(by_alias=True).items():
        if name == "staleness":
            cells |= {f"{name}Mean": weighted_mean(Counter(value)), f"{name}Max": max(value, default=None)}
        elif isinstance(value, dict):
            cells |= {f"{name}.{key}": number for key, number in value.items()}
        else:
            cells[name] = value
    return cells


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of `flat`, without what places the row: epoch, step, time."""
    return {
        name: float(value)
        for name, value in flat(row).items()
        if name not in _COMMON and isinstance(value, int | float) and math.isfinite(value)
    }


def write_csv(rows: Iterable[Row], file: IO[str]) -> None:
    """A header and a line a row; a column that a row lacks is empty there. No rows, no header."""
    table = [flat(row) for row in rows]
    columns = list(dict.fromkeys([*_COMMON, *(name for cells in table for name in cells)]))
    writer: csv.DictWriter[Any] = csv.DictWriter(file, columns, lineterminator="\n")
    if table:
        writer.writeheader()
    writer.writerows(table)


def write_jsonl(rows: Iterable[Row], file: IO[str]) -> None:
    """Each row as it is in the bucket."""
    for row in rows:
        file.write(row.to_json().decode() + "\n")


def resumed_at(history: History) -> dict[int, int]:
    """Epoch -> the step from which its trainer went on; epochs that began the run are left out."""
    return {row.epoch: row.step for row in history.events if row.event == "resumed"}
