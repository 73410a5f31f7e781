"""The reference pages of the operator against its code: reasons, events, phases, metrics, log events."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from tba_operator import faults, kueue, lifecycle, log, notes, plan, status
from tba_operator.api import CONDITIONS
from tba_operator.metrics import Metrics

ROOT = Path(__file__).parents[2]
CONDITIONS_PAGE = ROOT / "docs/reference/conditions-and-events.md"
METRICS_PAGE = ROOT / "docs/reference/operator-metrics.md"
MODULES = (faults, lifecycle, notes, plan, status)
REASON_AT = {"Is": 2, "Verdict": 1, "Fault": 0, "Note": 1}
"""Which argument of the call is the reason."""
FOREIGN = {"Complete": set(), "Failed": {"FailureRule"}}
NAME = re.compile(r"[A-Z][A-Za-z]+")


def section(page, title):
    """Text below a heading of the second level."""
    text = page.read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def listed(page, title):
    """Names in code quotes in the first column of the tables of a section."""
    cells = re.findall(r"^\| (`.*?) \|", section(page, title), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def names_in(module, node):
    """Names of reasons that an expression may give: literals, module constants, both sides of a choice."""
    for inner in ast.walk(node):
        value = inner.value if isinstance(inner, ast.Constant) else None
        if isinstance(inner, ast.Name) and inner.id.isupper():
            value = getattr(module, inner.id)
        if isinstance(value, str) and NAME.fullmatch(value):
            yield value


def calls(kind):
    """(module, call) of each call of `kind` in the pure modules."""
    for module in MODULES:
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == kind:
                yield module, node


def reasons(kind, condition=None):
    """Reasons that calls of `kind` name; of a condition that they name first, if one is asked for."""
    found = set()
    for module, call in calls(kind):
        about = call.args[0]
        if condition is None or (isinstance(about, ast.Constant) and about.value == condition):
            for argument in call.args[REASON_AT[kind] :][:1]:
                found |= set(names_in(module, argument))
    return found


def verdicts(kind):
    """Reasons of an end."""
    found = set()
    for module, call in calls("Verdict"):
        if ast.literal_eval(call.args[0]) == kind:
            found |= set(names_in(module, call.args[1]))
    return found


def reasons_of_the_code(condition):
    """All that a condition may say."""
    found = reasons("Is", condition)
    if condition == "Degraded":
        found |= set(faults.ORDER)
    if condition == "Admitted":
        found |= set(get_args(kueue.Admission.__annotations__["state"]))
    if condition == "TrainerReady":
        found |= stopped()
    if condition == "StorageReady":
        found.add("StorageUnreachable")
    if condition in ("Complete", "Failed"):
        found |= verdicts(condition) | FOREIGN[condition] | {"Finished", "NotFinished"}
    return found


def stopped():
    """The reasons that `status._stopped` returns."""
    tree = ast.parse(Path(status.__file__).read_text(encoding="utf-8"))
    [function] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_stopped"]
    returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
    return {value.elts[0].value for value in returned}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_page_has_every_reason_of_a_condition_and_no_other(condition):
    assert listed(CONDITIONS_PAGE, condition) == reasons_of_the_code(condition)


def test_every_fault_has_its_place_in_the_order_of_faults():
    made = reasons("Fault") - {"NotFound"}  # a part of a name
    made |= {"SyncStalled", "NoRewardSignal", "SecretNotFound", "ConfigMapNotFound", "ServiceAccountNotFound"}
    assert made == set(faults.ORDER)


def test_the_page_has_every_event_and_no_other():
    # Completed is an event by the reason of its condition; those of Failed, Degraded, Admitted are told in words.
    assert listed(CONDITIONS_PAGE, "Events") == reasons("Note") | {"Completed"}


def test_the_page_has_every_phase_and_no_other():
    tree = ast.parse(Path(status.__file__).read_text(encoding="utf-8"))
    [function] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_phase"]
    texts = {n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    phases = {text for text in texts if NAME.fullmatch(text)} - {"TrainerReady", "Succeeded"}
    assert listed(CONDITIONS_PAGE, "Phases") == phases


def test_the_page_has_every_metric_of_the_operator_and_no_other():
    text = section(METRICS_PAGE, "Metrics")
    told = set(re.findall(r"^\| `(tba_\w+)", text, re.MULTILINE))
    metrics = Metrics()
    families = [family for family in metrics.registry.collect() if family.name.startswith("tba_")]
    assert told == {f.name + ("_total" if f.type == "counter" else "") for f in families}


def test_the_page_has_every_log_event_of_the_operator_and_no_other():
    constants = {value for name, value in vars(log).items() if name.isupper() and isinstance(value, str)}
    written = set()
    for file in (ROOT / "operator/tba_operator").glob("*.py"):
        pattern = r'get_logger\(\)\.(?:info|warning|error)\(\s*"(\w+)"'
        written |= set(re.findall(pattern, file.read_text(encoding="utf-8")))
    assert listed(METRICS_PAGE, "Log") == constants | written
