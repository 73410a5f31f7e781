"""The Grafana dashboard asks for series that exist, by labels that they have."""

import json
import re
from pathlib import Path

import pytest
from support.jobs import smallest

from tba_operator.api import JobStatus, parse_job
from tba_operator.metrics import Metrics

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "charts/tba-operator/files/dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES = [variable["query"] for variable in DASHBOARD["templating"]["list"][1:]]
# Of a scraped pod: from Prometheus itself, and the labels that the PodMonitor hands on.
OF_TARGET = {"namespace", "pod", "job", "instance", "tba_dev_job_name", "tba_dev_role"}
SELECTOR = re.compile(r"\b(tba_\w+|process_\w+|up)(?:\{(.*?)\})?(?=[\s,)\[]|$)")


def of_workloads():
    """Series -> labels, from the reference, which test_docs compares with the code."""
    text = (ROOT / "docs/reference/metrics-and-events.md").read_text(encoding="utf-8").partition("## Log events")[0]
    found = {}
    for name, labels, kind in re.findall(r"^\| `(tba_\w+)(?:\{([\w,]+)\})?` \| (\w+)", text, re.MULTILINE):
        own = set(labels.split(",")) - {""}
        found |= {f"{name}_bucket": own | {"le"}} if kind == "histogram" else {name: own}
    return found


def of_operator():
    """Series -> labels, from a scrape after one of everything has happened."""
    metrics = Metrics()
    job = parse_job(smallest() | {"metadata": {"name": "gsm8k", "namespace": "a", "uid": "u", "generation": 1}})
    status = {"phase": "Complete", "startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T01:00:00Z"}
    complete = {"type": "Complete", "status": "True", "reason": "x", "message": "", "lastTransitionTime": ""}
    metrics.set_job(job, JobStatus.model_validate(status | {"conditions": [complete]}))
    metrics.count_error("Unavailable")
    metrics.count_request("get", "Pod", "ok")
    metrics.watch_heard("pods")
    series = re.findall(r"^(\w+)(?:\{(.*)\})? ", metrics.render().decode(), re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in series}


KNOWN = {"up": set(), "process_resident_memory_bytes": set()} | of_workloads() | of_operator()


def test_the_series_of_both_are_known():
    assert KNOWN["tba_sync_seconds_bucket"] == {"phase", "le"}
    assert KNOWN["tba_job_condition"] == {"namespace", "name", "type", "status"}


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *QUERIES])
def test_an_expression_names_series_and_labels_that_exist(expression):
    asked = SELECTOR.findall(expression.replace("label_values(", "").replace("tba_dev_", "TBA_DEV_"))
    assert asked
    has = set(OF_TARGET)
    for name, selector in asked:
        assert name in KNOWN
        has |= KNOWN[name]
        labels = {label.lower() for label in re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector)}
        assert labels <= KNOWN[name] | OF_TARGET
    for group in re.findall(r"\bby \((.*?)\)", expression):
        assert set(group.split(", ")) <= has


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_legend_names_labels_that_the_answer_has(panel):
    for target in panel["targets"]:
        groups = re.findall(r"\bby \((.*?)\)", target["expr"])
        names = re.findall(r"tba_\w+|process_\w+", target["expr"].replace("tba_dev_", ""))
        left = set(groups[-1].split(", ")) if groups else OF_TARGET.union(*(KNOWN[name] for name in names))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left


def test_no_series_of_a_role_is_mixed_with_the_other_roles_zeros():
    roles = re.findall(
        r"^\| `(tba_\w+).*?` \| \w+ \| (trainer|searcher) \|",
        (ROOT / "docs/reference/metrics-and-events.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(roles) > 15
    for name, role in roles:
        for expression in EXPRESSIONS:
            if re.search(rf"\b{name}(_bucket)?\{{", expression):
                assert f'tba_dev_role="{role}"' in expression


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_numbers_of_panels_are_unique():
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
