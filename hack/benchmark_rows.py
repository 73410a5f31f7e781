"""Rows of docs/results as Markdown tables: one row a line, or a subject a line where rows have a place.

A row is a `Row` of tests/bench/results.py as JSON has it. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from benchmark_commands import Origin, origin

Row = dict[str, Any]
_LONG = 40
"""Facts of more characters are lines below a table."""


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figure(row: Row, unit: str = "") -> str:
    """The median and the range of its runs."""
    runs = row["runs"] or []
    spread = f" [{number(min(runs))}, {number(max(runs))}]" if len(runs) > 1 else ""
    return f"{number(row['value'])} {unit}".strip() + spread


def met(row: Row) -> str:
    """Whether it is as good as its target, in one word."""
    return {True: "yes", False: "**no**", None: ""}[row["met"]]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A table without the columns that have no content, and an empty line."""
    kept = [i for i in range(len(head)) if any(line[i] for line in lines)]
    rows = [head, ["---"] * len(head), *lines]
    return [*("| " + " | ".join(row[i].replace("|", "\\|") for i in kept) + " |" for row in rows), ""]


def folded(summary: str, lines: Iterable[str]) -> list[str]:
    """Lines that show when asked for. GitHub reads Markdown in there after an empty line."""
    return [f"<details><summary>{summary}</summary>", "", *lines, "</details>", ""]


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[tuple[Any, list[Row]]]:
    """Rows by key, in the order of their first."""
    rows = list(rows)
    keys = list(dict.fromkeys(map(key, rows)))
    return [(k, list(found)) for k, found in groupby(sorted(rows, key=lambda r: keys.index(key(r))), key)]


def current(rows: list[Row]) -> list[Row]:
    """Without those of older starts."""
    newest = next((r["place"]["start"] for r in rows if r.get("place")), "")
    return [r for r in rows if not r.get("place") or r["place"]["start"] == newest]


def tables(rows: list[Row], numbers: Mapping[Origin, int], lead: Sequence[str]) -> list[str]:
    """All rows of a file, each with its command's number. `lead` names facts that stand beside the figures."""
    plain, placed = ([r for r in rows if bool(r.get("place")) == has] for has in (False, True))
    lines = [line for part in _parts(plain) for line in _plain(part, numbers)]
    for start, found in grouped(placed, lambda r: r["place"]["start"]):
        inner: list[str] = []
        for name, those in grouped(found, lambda r: r["place"]["table"]):
            base = ", ".join({r["baseline"]["name"]: None for r in those if r["baseline"]})
            told = (name and f"**{name}**", start and f"start {start}", base and f"× is the ratio to {base}")
            caption = "; ".join(filter(None, told))
            inner += [*([caption, ""] if caption else []), *_wide(those, numbers, lead)]
        newest = start == placed[0]["place"]["start"]
        lines += inner if newest else folded(f"Other starting weights: {start or 'not written down'}", inner)
    return lines


def _parts(rows: list[Row]) -> list[list[Row]]:
    """Rows in the parts that their notes tell by how they begin, if these are longer than a few rows."""
    parts = [list(found) for _, found in groupby(rows, lambda r: (r["note"] or "").partition("; ")[0])]
    return parts if all(len(part) > 3 for part in parts) else [rows]


def _plain(rows: list[Row], numbers: Mapping[Origin, int]) -> list[str]:
    notes = [(r["note"] or "").split("; ") for r in rows]
    common = [part for part in notes[0] if part and all(part in note for note in notes)] if len(rows) > 1 else []
    lines = []
    for row, note in zip(rows, notes, strict=True):
        base, ratio = row["baseline"], row["ratio"]
        lines.append([
            row["metric"],
            figure(row, row["unit"]),
            f"{base['name']}: {number(base['value'])}" if base else "",
            "" if ratio is None else f"{ratio:.3g}",
            row["target"] or "",
            met(row),
            "; ".join(part for part in note if part not in common),
            str(numbers[origin(row)]),
        ])  # fmt: skip
    head = ["what", "value", "baseline", "ratio", "goal", "met", "note", "#"]
    return [*([f"All rows below: {'; '.join(common)}.", ""] if common else []), *table(head, lines)]


def _wide(rows: list[Row], numbers: Mapping[Origin, int], lead: Sequence[str]) -> list[str]:
    subjects = grouped(rows, lambda r: tuple(r["place"]["subject"].items()))
    names = list(dict.fromkeys(name for subject, _ in subjects for name, _ in subject))
    # Columns that end in a number follow each other, where the first of them is.
    stems = [(name.rstrip("0123456789."), name) for name in dict.fromkeys(r["place"]["column"] for r in rows)]
    first_of = [stem for stem, _ in stems]
    columns = [name for _, name in sorted(stems, key=lambda s: (first_of.index(s[0]), s[1]))]
    firsts = [[dict(subject).get(name, "") for name in names] for subject, _ in subjects]
    facts = [{k: _fact(v) for r in found for k, v in r["place"]["facts"].items()} for _, found in subjects]
    lines = []
    for first, known, (_, found) in zip(firsts, facts, subjects, strict=True):
        cells = ["<br>".join(_cell(r) for r in found if r["place"]["column"] == column) for column in columns]
        n = _several(len(r["seeds"]) for r in found if r["seeds"])
        command = _several(numbers[origin(r)] for r in found)
        lines.append([*first, n, *cells, *(known.get(name, "") for name in lead), command])
    head = [*names, "n", *(_headed(column, rows) for column in columns), *lead, "#"]
    return [*table(head, lines), *_beside(names, firsts, [{k: f[k] for k in f if k not in lead} for f in facts])]


def _beside(names: list[str], firsts: list[list[str]], facts: list[dict[str, str]]) -> list[str]:
    """What is not among the figures, folded: a table, and below it those names that some subject has much to say of."""
    told = list(dict.fromkeys(name for known in facts for name in known))
    long = [name for name in told if any(len(known.get(name, "")) > _LONG for known in facts)]
    short = [name for name in told if name not in long]
    both = list(zip(firsts, facts, strict=True))
    lines = table([*names, *short], [[*first, *(known.get(name, "") for name in short)] for first, known in both])
    for first, known in both:
        if texts := [f"{name} {known[name]}" for name in long if name in known]:
            lines.append(f"* {', '.join(filter(None, first))}: {'; '.join(texts)}")
    return folded("What else was measured", [*lines, *([""] if long else [])]) if told else []


def _cell(row: Row) -> str:
    place, runs, seeds = row["place"], row["runs"] or [], row["seeds"] or []
    ratio = "" if row["ratio"] is None else f"×{row['ratio']:.3g}"
    part = f"({len(runs)} of {len(seeds)})" if runs and len(runs) < len(seeds) else ""
    beside = f"({place['beside']})" if place["beside"] else ""
    label = f"{place['label']}:" if place["label"] else ""
    return " ".join(filter(None, (label, figure(row), ratio, part, beside, met(row))))


def _headed(column: str, rows: list[Row]) -> str:
    found = [r for r in rows if r["place"]["column"] == column and r["target"]]
    goals = {f"{'×' if r['baseline'] else ''} {r['target']}".strip() for r in found}
    return f"{column}; goal {', '.join(sorted(goals))}" if goals else column


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_fact, value))
    return number(value) if isinstance(value, int | float) else str(value)


def _several(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))
