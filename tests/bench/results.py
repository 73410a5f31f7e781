"""Rows of measured results: one format for every bench and study, as JSON and as a table; `met` is computed.

    rows = [record("perf", "shards", "encode", 1.2e5, "rows/s", target=">= 1e5", runs=[1.1e5, 1.2e5, 1.3e5])]
    write(rows, Path("docs/results/shards.json")); print(table(rows))

A target compares the ratio to the baseline where the row has a baseline, else the value.
"""

import json
import operator
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FAMILIES = ("perf", "faults", "science", "scale")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands in a wide table, in which all rows of a subject share a line."""

    subject: dict[str, str]
    """The first columns: what was measured."""
    column: str
    """What the number is, with its unit."""
    table: str = ""
    """What all lines of the table have in common."""
    start: str = ""
    """Digest of the weights that it began with. Tables of another start than the first row's are folded."""
    label: str = ""
    """Tells it from others in the same cell."""
    beside: str = ""
    """What it was made of, in few words."""
    goal: str = ""
    """What its target is about: rows that share one are judged together."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known of the subject."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number with what it takes to judge and repeat it."""

    family: str
    bench: str
    metric: str
    value: float
    unit: str
    baseline: dict[str, str | float] | None  # {"name", "value"}
    ratio: float | None  # value / baseline value
    target: str | None
    met: bool | None  # None without a target
    runs: list[float] | None
    seeds: list[int] | None
    machine: str
    date: str
    command: str
    note: str
    place: Place | None = None  # None: a line of its own


def record(
    family: str,
    bench: str,
    metric: str,
    value: float,
    unit: str,
    *,
    baseline: tuple[str, float] | None = None,
    target: str | None = None,
    runs: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    command: str | None = None,
    note: str = "",
    place: Place | None = None,
) -> Row:
    """Make a row; `command` defaults to this process's own, relative to the repository.

    Raises: ValueError for an unknown family or a target that is not e.g. ">= 2.0".
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    ratio = None if baseline is None else value / baseline[1]
    return Row(
        family=family,
        bench=bench,
        metric=metric,
        value=float(value),
        unit=unit,
        baseline=None if baseline is None else {"name": baseline[0], "value": float(baseline[1])},
        ratio=ratio,
        target=target,
        met=None if target is None else _met(value if ratio is None else ratio, target),
        runs=None if runs is None else [float(r) for r in runs],
        seeds=None if seeds is None else [int(s) for s in seeds],
        machine=machine(),
        date=datetime.now(UTC).date().isoformat(),
        command=own_command() if command is None else command,
        note=note,
        place=place,
    )


def write(rows: Iterable[Row], path: Path) -> None:
    """Write the rows as a JSON list, one row a line, so that a diff shows which number moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def table(rows: Iterable[Row]) -> str:
    """A Markdown table: what, value, range of the runs, baseline, target, met, note."""
    header = ["bench", "metric", "value", "min – max", "baseline", "ratio", "target", "met", "note"]
    body = [_cells(row) for row in rows]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [header, rule, *body]
    )


def machine() -> str:
    """Processor, cores, memory and GPUs of this machine, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores", f"{memory:.0f} GiB"]
    torch = sys.modules.get("torch")  # only a bench that uses torch can have used a GPU
    if torch is not None and torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    return ", ".join(parts)


def own_command() -> str:
    """The command line of this process, without paths of this machine in front of the script."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(_ROOT)) if script.is_relative_to(_ROOT) else script.name
    return f"PYTHONPATH=workloads python {shlex.join([name, *sys.argv[1:]])}"


def _met(value: float, target: str) -> bool:
    found = re.fullmatch(r"(>=|<=|==|>|<)\s*(\S+)", target.strip())
    if not found:
        raise ValueError(f"target must be a comparison such as '>= 2.0', got {target!r}")
    return bool(_COMPARE[found[1]](value, float(found[2])))


def _cells(row: Row) -> list[str]:
    met = {True: "yes", False: "NO", None: ""}[row.met]
    return [
        row.bench,
        row.metric,
        f"{_number(row.value)} {row.unit}",
        "" if not row.runs else f"{_number(min(row.runs))} – {_number(max(row.runs))}",
        "" if row.baseline is None else f"{row.baseline['name']}: {_number(float(row.baseline['value']))}",
        "" if row.ratio is None else f"{row.ratio:.3g}x",
        row.target or "",
        met,
        row.note,
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
