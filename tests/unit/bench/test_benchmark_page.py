"""docs/benchmarks.md: every row is there with the command that printed it, and what was missed is told at the top."""

import importlib
import json
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from bench.results import Place, record, write

ROOT = Path(__file__).parents[3]
FILES = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "docs/results").glob("*.json"))}
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


@pytest.fixture
def page(monkeypatch):
    """hack/benchmark_tables.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "hack"))
    return importlib.import_module("benchmark_tables")


def sections(text):
    """Heading -> text below it; comments of a shell are no headings."""
    text = BLOCK.sub(lambda found: found[0].replace("\n## ", "\n#: "), text)
    return dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])


def lines_of(text):
    """Every line of every table as {column: cell}, without what a column's head says of its goal."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rest = ([cell.strip() for cell in line[1:-1].split(" | ")] for line in table.splitlines())
        found += [dict(zip((h.partition("; goal")[0] for h in head), cells, strict=True)) for cells in rest]
    return found


def short(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figures(row):
    """All that was measured of a row and how it was judged, as the page writes it."""
    runs, place = row["runs"] or [], row["place"]
    yield short(row["value"])
    if len(runs) > 1:
        yield f"[{short(min(runs))}, {short(max(runs))}]"
    if row["ratio"] is not None:
        yield f"×{row['ratio']:.3g}" if place else f"{row['ratio']:.3g}"
    if place and runs and len(runs) < len(row["seeds"]):
        yield f"({len(runs)} of {len(row['seeds'])})"
    if place and place["label"]:
        yield f"{place['label']}:"
    if row["met"] is not None:
        yield "yes" if row["met"] else "**no**"


def found_in(row, lines):
    """Lines that are of this row and have all its figures."""
    row = {"place": None} | row
    place = row["place"]
    names = place["subject"] if place else {"what": row["metric"]}
    columns = [place["column"]] if place else ["value", "ratio", "met"]

    def has(line):
        cells = [part.split() for column in columns for part in line.get(column, "").split("<br>")]
        if place:  # all in one part of one cell
            return any(all(f" {figure} " in f" {' '.join(part)} " for figure in figures(row)) for part in cells)
        return all(any(f" {figure} " in f" {' '.join(part)} " for part in cells) for figure in figures(row))

    return [line for line in lines if all(line.get(n, "") == v for n, v in names.items()) and has(line)]


@pytest.mark.parametrize("name", FILES)
def test_every_row_of_a_results_file_is_in_its_section_with_all_its_figures(page, name):
    text = sections(page.render())[page.SECTIONS[name].title]
    lines = lines_of(text)
    assert FILES[name]
    for row in FILES[name]:
        found, base = found_in(row, lines), row["baseline"]
        assert found, row["metric"]
        if not row.get("place"):
            below = " ".join(re.findall(r"^All rows below: .*", text, re.MULTILINE))
            assert any(all(part in line.get("note", "") + below for part in row["note"].split("; ")) for line in found)
        if base and not row.get("place"):
            assert any(line["baseline"] == f"{base['name']}: {short(base['value'])}" for line in found)
        elif base:  # a line of its own
            column = row["place"]["column"]
            assert f"× is the ratio to {base['name']}" in text
            assert [1 for x in lines if base["name"] in x["arm"] and short(base["value"]) in x.get(column, "").split()]


@pytest.mark.parametrize("name", FILES)
def test_whatever_else_is_known_of_a_subject_is_in_its_section(page, name):
    text = sections(page.render())[page.SECTIONS[name].title]
    lines = lines_of(text)
    for place in (row["place"] for row in FILES[name] if row.get("place")):
        for fact, value in place["facts"].items():
            values = value if isinstance(value, list) else [value]
            told = ", ".join(short(v) if isinstance(v, int | float) else v for v in values)
            of = [line for line in lines if all(line.get(k) == v for k, v in place["subject"].items())]
            below = re.findall(rf"^\* {re.escape(', '.join(filter(None, place['subject'].values())))}: .*", text, re.M)
            assert any(line.get(fact) == told for line in of) or any(f"{fact} {told}" in line for line in below), fact


@pytest.mark.parametrize("name", FILES)
def test_every_row_has_the_number_of_a_listed_command_that_means_what_printed_it(page, name):
    text = sections(page.render())[page.SECTIONS[name].title]
    functions, listed = block_of(text)
    origins = list(dict.fromkeys((f"{r['machine']}, {r['date']}", r["command"]) for r in FILES[name]))
    called = meanings([*functions, *(command for _, command in listed.values()), *(c for _, c in origins)])
    means = dict(zip(listed, called, strict=False))
    wanted = dict(zip(origins, called[len(listed) :], strict=True))
    lines = lines_of(text)
    for row in FILES[name]:
        place = f"{row['machine']}, {row['date']}"
        numbers = {n for line in found_in(row, lines) for n in line["#"].split(", ") if listed[n][0] == place}
        assert any(means[n] == wanted[place, row["command"]] for n in numbers), row["metric"]


def block_of(text):
    """(functions, {number: (machine and date, command)})."""
    functions, listed, place, number = [], {}, "", ""
    [block] = BLOCK.findall(text)
    for line in block.splitlines():
        if line.startswith("#: "):
            place = line.removeprefix("#: ")
            assert place not in {p for p, _ in listed.values()}
        elif line.startswith("# "):
            number = line.removeprefix("# ")
        elif "() {" in line:
            functions.append(line)
        else:
            assert number not in listed
            listed[number] = (place, line)
    return functions, listed


def meanings(script):
    """What each call of `python` in a shell script asks for: which options, and the last of each, which wins."""
    python = r"""python() { printf '%s\x1f' "$PYTHONPATH" "$@"; printf '\n'; }"""
    argv = ["bash", "-euc", "\n".join([python, *script])]
    env = {"HOME": "/home", "PYTHONPATH": "", "PATH": "/bin:/usr/bin"}
    done = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found = []
    for line in done.stdout.splitlines():
        path, program, *words = line.split("\x1f")[:-1]
        options: list[list[str]] = [[]]
        for word in words:
            if word.startswith("-"):
                options.append([])
            options[-1].append(word)
        last = {option[0]: option[1:] for option in options[1:]}
        found.append((path, program, options[0], Counter(map(tuple, options)), last))
    return found


def page_of(page, folder, **files):
    """The page of results that are made up."""
    for name, rows in files.items():
        write(rows, folder / f"{name}.json")
    return page.render(folder)


def made(metric="speed", value=1.0, unit="s", target=None, command="python a.py", **more):
    row = record("perf", "a", metric, value, unit, target=target, command=command, **more)
    return replace(row, machine="a machine", date="2026-01-01")


def test_goals_come_first_and_every_goal_of_the_newest_start_is_judged_there(page):
    text = page.render()
    assert list(sections(text))[:2] == ["Goals", "Contents"]
    goals = lines_of(sections(text)["Goals"])
    of_today = {name: page.current(rows) for name, rows in FILES.items()}
    judged = [row for rows in of_today.values() for row in rows if row["target"]]
    missed = sum(not row["met"] for row in judged)
    assert f"{len(judged) - missed} of {len(judged)} rows" in text and f"{missed} do **not**" in text
    for name, rows in of_today.items():
        lines = [line for line in goals if f"[{page.SECTIONS[name].title}](#" in line["section"]]
        bad = [line for line in lines if line["met"].startswith("**no**")]
        wrong = [row for row in rows if row["target"] and not row["met"]]
        assert bool(bad) == bool(wrong)
        placed = {row["place"]["goal"] for row in wrong if row.get("place")}
        assert placed <= {line["what"] for line in bad}
        others = [line["what"].partition(" and ") for line in bad if line["what"] not in placed]
        metrics = {row["metric"] for row in wrong if not row.get("place")}
        assert {worst for worst, _, _ in others} <= metrics
        assert sum(1 + int(more.removesuffix(" more") or 0) for _, _, more in others) == len(metrics)


def test_a_missed_target_stands_alone_among_met_ones_of_its_kind(page, tmp_path):
    rows = [made(f"part {i}", float(i), target="<= 3", runs=[i - 0.5, i + 0.5, i], seeds=[0, 1, 2]) for i in range(5)]
    goals = lines_of(sections(page_of(page, tmp_path, anew=rows))["Goals"])
    assert [(g["what"], g["measured"], g["met"]) for g in goals] == [
        ("part 3 and 3 more", "3 to 0 s, n = 3", "yes"),
        ("part 4", "4 s [3.5, 4.5], n = 3", "**no**"),
    ]


def test_rows_of_one_goal_are_met_only_if_all_are(page, tmp_path):
    def at(threshold: float, value: float):
        place = Place({"arm": "ours"}, "eta", label=f"to {threshold}", goal="ours: eta")
        return made(f"eta at {threshold}", value, "", target=">= 0.9", seeds=[0], place=place)

    text = page_of(page, tmp_path, anew=[at(0.5, 0.95), at(0.6, 0.4), at(0.7, 1.0)])
    [goal] = lines_of(sections(text)["Goals"])
    assert (goal["measured"], goal["met"]) == ("0.4 to 1, n = 1", "**no**: 1 of 3 missed")
    [line] = lines_of(sections(text)["anew"])
    assert line["eta"] == "to 0.5: 0.95 yes<br>to 0.6: 0.4 **no**<br>to 0.7: 1 yes"
    [goal] = lines_of(sections(page_of(page, tmp_path, anew=[at(0.5, 0.95), at(0.7, 1.0)]))["Goals"])
    assert goal["met"] == "yes"


def test_an_older_start_is_folded_and_not_among_the_goals(page, tmp_path):
    def from_start(start: str):
        place = Place({"arm": f"arm of {start}"}, "eta", start=start, goal=f"eta of {start}")
        return made(f"{start}: eta", 0.5, "", target=">= 0.9", place=place)

    text = page_of(page, tmp_path, anew=[from_start("new"), from_start("old")])
    assert "eta of new" in text and "eta of old" not in text
    open_part, _, folded = sections(text)["anew"].partition("<details>")
    assert "arm of new" in open_part and "arm of old" not in open_part and "arm of old" in folded


def test_a_results_file_that_nobody_described_has_a_section_at_the_end(page, tmp_path):
    text = page_of(page, tmp_path, aaa=[made("secret of aaa")], trainer=[made()], buffer=[made()])
    assert list(sections(text)) == ["Goals", "Contents", "Trainer step", "Replay buffer", "aaa"]
    assert "* [aaa](#aaa)\n" in text and "secret of aaa" in sections(text)["aaa"]


def test_what_is_folded_is_markdown_to_github_only_after_an_empty_line(page):
    text = page.render()
    assert re.findall(r"<details>.*\n", text) and not re.findall(r"<details>.*\n(?!\n)", text)
    assert not re.findall(r"[^\n]\n</details>", text) and text.count("<details>") == text.count("</details>")
    assert not re.findall(r"^[^|\n].*\n\|", text, re.MULTILINE)  # a table needs one before it as well


def test_what_commands_share_is_written_once_unless_another_value_of_it_comes_first(page, tmp_path):
    commands = [
        "A=1 python a.py --steps 2 --name 'one two' --same x --steps 3",
        "A=1 python a.py --steps 3 --name three --same x",
    ]
    text = sections(page_of(page, tmp_path, anew=[made(str(i), command=c) for i, c in enumerate(commands)]))["anew"]
    functions, listed = block_of(text)
    assert functions == ['a() { A=1 python a.py --same x "$@"; }']
    assert [c for _, c in listed.values()] == ["a --steps 2 --name 'one two' --steps 3", "a --steps 3 --name three"]
    calls = meanings([*functions, *(c for _, c in listed.values()), *commands])
    assert calls[:2] == calls[2:]
