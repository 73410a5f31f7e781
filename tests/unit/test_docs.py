"""The documentation against the code: links, commands, jobs, names and quoted messages."""

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer

from tba.cli import COMMANDS, app
from tba.cli.jobfile import _parse
from tba.contracts.job import TBAJob
from tba.telemetry import REGISTRY
from tba_operator.cli import _cluster

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "workloads/tba"
OPERATOR = ROOT / "operator/tba_operator"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
GENERATED = {
    "docs/reference/commands.md": "command_reference.py",
    "docs/reference/job.md": "job_reference.py",
    "docs/reference/pains.md": "pains.py",
}


def name(page):
    return str(page.relative_to(ROOT))


def each_page():
    return pytest.mark.parametrize("page", PAGES, ids=name)


# -- links


def headings(page):
    """Anchors as the usual renderers make them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in found}


@each_page()
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in headings(file)):
            broken.append(target)
    assert not broken


def test_the_index_names_every_page_of_the_user():
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs") for p in PAGES if p.is_relative_to(ROOT / "docs")]
    # Pages of results are parts of benchmarks.md.
    others = [p for p in pages if p.name != "README.md" and p.parts[0] not in ("decisions", "results")]
    missing = [str(p) for p in others if f"({p})" not in text]
    assert not missing


# -- commands


@cache
def commands():
    """Name as typed -> (options that take a value, flags, number of arguments)."""
    root = typer.main.get_command(app)
    found = {}
    for first in COMMANDS:
        command = root.commands[first].load()
        for sub, inner in getattr(command, "commands", {"": command}).items():
            found[f"{first} {sub}".strip()] = describe(inner)
    for plugin in entry_points(group="tba.commands"):
        alone = typer.Typer()
        alone.command()(plugin.load())
        found[plugin.name] = describe(typer.main.get_command(alone))
    return found


@cache
def kubectl_commands():
    """Of `kubectl tba`: those of `tba`, some of them with a job of the cluster for a run."""
    cluster: Any = typer.main.get_command(_cluster)
    return commands() | {name: describe(command) for name, command in cluster.commands.items()}


def describe(command):
    options = [p for p in command.params if p.param_type_name == "option"]
    flags = {n for p in options if p.is_flag for n in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    values = {n for p in options if not p.is_flag for n in p.opts}
    return values, flags, sum(p.param_type_name == "argument" for p in command.params)


def command_lines(text):
    """Every `tba ...` of shell blocks and of inline code. Prose that only names a command counts too."""
    for kind, body in FENCE.findall(text):
        if kind == "sh":
            for line in re.sub(r"\\\n", " ", body).splitlines():
                yield from (part.strip() for part in re.split(r"&&|;|\|", line.partition(" #")[0]))
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)))


def fault_of(words, known=None):
    """Why `tba WORDS` cannot be typed, or None. Placeholders in capitals and a bare name of a command are fine."""
    if words[:1] == ["--help"] or words[:1] == ["COMMAND"] or words == ["inspect"] or words == ["storage"]:
        return None
    known = known or commands()
    width = 2 if " ".join(words[:2]) in known else 1
    called = " ".join(words[:width])
    if called not in known:
        return f"no command {called!r}"
    values, flags, count = known[called]
    rest, given = words[width:], 0
    while rest:
        word = rest.pop(0)
        option, _, inline = word.partition("=")
        if option in values:
            if not inline and not rest:
                return f"{option} of {called} takes a value"
            rest = rest if inline else rest[1:]
        elif word.startswith("-"):
            if word not in flags:
                return f"{called} has no option {word}"
        elif word not in (">", "..."):
            given += 1
    return f"{called} takes {count} arguments, got {given}" if given > count else None


@each_page()
def test_every_command_line_names_an_existing_command_and_its_options(page):
    faults = []
    for line in command_lines(page.read_text(encoding="utf-8")):
        words = shlex.split(line, posix=True) if line.count("'") % 2 == 0 and line.count('"') % 2 == 0 else line.split()
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words = words[1:]
        if words[:1] == ["tba"] and len(words) > 1 and (fault := fault_of(words[1:])):
            faults.append(f"{line}: {fault}")
        if words[:2] == ["kubectl", "tba"] and len(words) > 2 and (fault := fault_of(words[2:], kubectl_commands())):
            faults.append(f"{line}: {fault}")
    assert not faults


@pytest.mark.parametrize(
    "line", ["status", "run job.yaml --set a=b --dry-run", "inspect shards RUN --limit 3", "pin RUN STEP --remove"]
)
def test_a_right_command_line_has_no_fault(line):
    assert fault_of(line.split()) is None


@pytest.mark.parametrize("line", ["bogus", "inspect nothing", "run job.yaml --steps 3", "status a b", "export RUN -o"])
def test_a_wrong_command_line_has_a_fault(line):
    assert fault_of(line.split()) is not None


# -- jobs and generated pages


def jobs():
    for page in PAGES:
        for kind, body in FENCE.findall(page.read_text(encoding="utf-8")):
            if kind == "yaml" and "kind: TBAJob" in body:
                yield pytest.param(body, id=name(page))


@pytest.mark.parametrize("text", list(jobs()))
def test_every_whole_job_in_the_documentation_is_valid(text):
    job = TBAJob.model_validate(_parse(text, "documentation"))
    assert job.spec.storage.uri


def test_every_piece_of_a_job_in_the_documentation_fits_the_smallest_job():
    whole = (ROOT / "README.md").read_text(encoding="utf-8")
    smallest = next(body for kind, body in FENCE.findall(whole) if kind == "yaml" and "kind: TBAJob" in body)
    pieces = [
        body
        for page in PAGES
        for kind, body in FENCE.findall(page.read_text(encoding="utf-8"))
        if kind == "yaml" and "kind: TBAJob" not in body
    ]
    assert pieces
    for piece in pieces:
        data = _parse(smallest, "README.md")
        merge(data["spec"], _parse(piece, "documentation"))
        TBAJob.model_validate(data)


def merge(base, change):
    """Sections are merged; reward and prompts are replaced: each is one of several kinds."""
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict) and key not in ("reward", "prompts"):
            merge(base[key], value)
        else:
            base[key] = value


@pytest.mark.parametrize("script", GENERATED.values())
def test_a_generated_page_is_what_its_script_writes(script):
    done = subprocess.run(
        [sys.executable, f"hack/{script}", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- names


def test_the_reference_has_every_metric_and_no_other():
    text = (ROOT / "docs/reference/metrics-and-events.md").read_text(encoding="utf-8")
    table = text.partition("## Log events")[0]
    listed = set(re.findall(r"^\| `(tba_\w+)", table, re.MULTILINE))
    made = {m.name + ("_total" if m.type == "counter" else "") for m in REGISTRY.collect() if m.name.startswith("tba_")}
    assert listed == made


def events_of_the_code():
    """Events that some module writes: constants of tba.log that are used, and names written out in a call."""
    constants = dict(
        re.findall(r'^([A-Z_]+) = "(\w+)"', (SOURCES / "log.py").read_text(encoding="utf-8"), re.MULTILINE)
    )
    written, hidden = set(), set()
    for file in SOURCES.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file.name == "log.py":
            continue
        written |= {value for constant, value in constants.items() if re.search(rf"\b{constant}\b", text)}
        written |= set(re.findall(r'\blog\.(?:info|warning|error)\(\s*"(\w+)"', text))
        hidden |= {constants[c] for c in re.findall(r"\blog\.debug\(([A-Z_]+)", text)}
    return written - hidden


def test_the_reference_has_every_log_event_and_no_other():
    text = (ROOT / "docs/reference/metrics-and-events.md").read_text(encoding="utf-8")
    section = text.partition("## Log events")[2].partition("## Run history")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = {event for cell in cells for event in re.findall(r"`(\w+)`", cell)}
    assert listed == events_of_the_code()


@cache
def strings_of_the_code():
    """Every text of the sources; of an f-string its constant parts, with a gap for each value."""
    found = []
    for file in (*SOURCES.rglob("*.py"), *OPERATOR.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("\0".join(v.value if isinstance(v, ast.Constant) else "" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\1".join(found)


def quoted_messages():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    return [m.removeprefix(t).removesuffix(t) for t, m in re.findall(r"^### (?=(`+))(.+)$", text, re.MULTILINE)]


@pytest.mark.parametrize("message", quoted_messages())
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(message):
    pieces = [p.strip(" :;,(") for p in message.split("…")]
    assert max(map(len, pieces)) >= 10
    assert not [p for p in pieces if p and p not in strings_of_the_code()]


def test_the_troubleshooting_page_explains_at_least_fifteen_messages():
    assert len(quoted_messages()) >= 15


def test_types_of_job_fields_are_told_in_words():
    cells = re.findall(r"^\| `[\w.]+` \| (.*?) \|", (ROOT / "docs/reference/job.md").read_text("utf-8"), re.MULTILINE)
    assert len(cells) > 100
    assert not [cell for cell in cells if "=" in cell or "." in cell]


def test_every_exit_code_is_explained():
    text = (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    codes = set(re.findall(r"^\| (\d+)", text, re.MULTILINE))
    declared = set(re.findall(r"exit_code = (\d+)", (SOURCES / "contracts/errors.py").read_text(encoding="utf-8")))
    declared |= set(re.findall(r"^[A-Z]+ = (\d+)", (SOURCES / "cli/exit.py").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"0", *declared} <= codes


def test_the_documentation_names_no_folder_of_this_machine():
    assert not [name(p) for p in PAGES if re.search(r"/work/|/root/|127\.0\.0\.1:\d", p.read_text(encoding="utf-8"))]


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
