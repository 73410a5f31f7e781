"""The chart without helm: values, their schema, the README, and what the Deployment says to the operator."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tba_operator.rbac import Place
from tba_operator.settings import VARIABLES

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/tba-operator"
TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
VALUES = yaml.safe_load(TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").rglob("*.*"))}
META = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def hack(monkeypatch):
    """hack/chart.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "hack"))
    return importlib.import_module("chart")


def leaves(values, schema, path=""):
    """(path, value, its schema) of all values that a user sets as a whole."""
    for name, value in values.items():
        inner = schema["properties"][name]
        if "properties" in inner and name != "resources":
            yield from leaves(value, inner, f"{path}{name}.")
        else:
            yield f"{path}{name}", value, inner


def at(path):
    inner = SCHEMA
    for name in path.split("."):
        inner = inner["properties"][name]
    return inner


@pytest.mark.parametrize("script", ["chart.py", "dashboard.py"])
def test_a_generated_file_is_what_its_script_writes(script):
    done = subprocess.run(
        [sys.executable, f"hack/{script}", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# -- values and schema


def test_the_schema_has_the_values_and_nothing_else():
    def same(values, schema, path):
        assert schema["additionalProperties"] is False, path
        assert schema["properties"].keys() - {"global"} == values.keys(), path
        for name, inner in schema["properties"].items():
            if "properties" in inner and name != "resources":
                same(values[name], inner, f"{path}.{name}")

    same(VALUES, SCHEMA, "values")


def test_the_defaults_are_of_the_types_that_the_schema_wants():
    kinds = {"string": str, "boolean": bool, "integer": int, "number": int, "array": list, "object": dict}
    found = list(leaves(VALUES, SCHEMA))
    assert len(found) > 30
    for path, value, inner in found:
        assert type(value) is kinds[inner["type"]], path
        assert value in inner.get("enum", [value]), path
        assert re.search(inner.get("pattern", ""), value if isinstance(value, str) else ""), path


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("image.digest", "sha256:" + "0" * 64, "latest"),
        ("serviceMonitor.interval", "30s", "30"),
        ("imagePullSecrets", "my.registry-1", "My_Registry"),
        ("watch.namespaces", "team-a", "team.a"),
    ],
)
def test_a_pattern_tells_right_from_wrong(path, good, bad):
    inner = at(path)
    pattern = inner.get("items", inner)["pattern"]
    assert re.search(pattern, good) and not re.search(pattern, bad)


def test_more_variables_may_not_be_called_like_the_settings():
    name = at("extraEnv")["items"]["properties"]["name"]
    assert all(re.search(name["not"]["pattern"], variable) for variable in VARIABLES)
    assert re.search(name["pattern"], "SSL_CERT_FILE") and not re.search(name["not"]["pattern"], "SSL_CERT_FILE")


def test_every_value_is_told_in_the_readme_and_the_schema():
    table = (CHART / "README.md").read_text(encoding="utf-8")
    for path, _, inner in leaves(VALUES, SCHEMA):
        assert f"| `{path}` |" in table
        assert inner["description"] in table, path


def test_a_value_without_a_comment_is_refused_by_its_path(hack):
    with pytest.raises(KeyError, match=r"image\.flavour has no"):
        hack.render(TEXT.replace("  # -- Tag;", "  flavour: x\n  # -- Tag;"))


def test_a_constraint_of_no_value_is_refused(hack):
    with pytest.raises(ValueError, match="names what values.yaml has not: workers"):
        hack.render(TEXT.replace("workers: 4", "hands: 4"))


def test_templates_use_every_value_and_no_other():
    used = set()
    for text in TEMPLATES.values():
        used |= {match.rstrip(".") for match in re.findall(r"\.Values\.([A-Za-z.]+)", text)}
    assert used == {path for path, _, _ in leaves(VALUES, SCHEMA)}


# -- what the Deployment says


def test_the_deployment_sets_every_setting_of_a_pod_and_no_other():
    set_here = set(re.findall(r"name: (TBA_\w+)", TEMPLATES["deployment.yaml"]))
    # Only for development outside of the cluster: the chart grants no pods/proxy.
    assert set_here == VARIABLES.keys() - {"TBA_PROGRESS_THROUGH_API"}


def test_each_release_has_a_lease_of_its_own():
    # Two in one namespace may watch different namespaces: both have to lead.
    assert '{name: TBA_LEASE_NAME, value: {{ include "tba.name" . }}}' in TEMPLATES["deployment.yaml"]


def test_the_container_listens_where_probes_service_and_policy_look():
    assert '{name: TBA_HTTP_PORT, value: "8080"}' in TEMPLATES["deployment.yaml"]
    for name in ("deployment.yaml", "service.yaml", "networkpolicy.yaml", "test.yaml"):
        assert set(re.findall(r"[pP]ort: (\d+)|svc:(\d+)", TEMPLATES[name])) <= {("8080", ""), ("", "8080")}, name


def test_service_links_are_off():
    # A Service called tba-http in the namespace would set TBA_HTTP_PORT=tcp://…
    assert "enableServiceLinks: false" in TEMPLATES["deployment.yaml"]


def test_chart_and_package_have_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert META["version"] == META["appVersion"] == project["version"]


# -- roles


def test_the_roles_take_up_every_part_of_the_table_once():
    taken = re.findall(r"\$rules\.(\w+)", TEMPLATES["rbac.yaml"])
    assert sorted(taken) == ["cluster", "lease", "namespaced", "namespaced"]  # a ClusterRole, or a Role a namespace
    assert set(taken) == set(get_args(Place)) == yaml.safe_load((CHART / "files/rbac-rules.yaml").read_text()).keys()


# -- the custom resource definition


def test_the_crd_is_kept_when_the_chart_goes():
    # The template puts the annotation behind this line.
    assert (CHART / "files/crd.yaml").read_text(encoding="utf-8").count("\n  name: tbajobs.tba.dev\n") == 1
    assert "annotations: {helm.sh/resource-policy: keep}" in TEMPLATES["crd.yaml"]
    assert not (CHART / "crds").exists(), "helm never upgrades what lies in crds/"


def test_the_chart_has_the_crd_of_the_repository():
    assert (CHART / "files/crd.yaml").read_bytes() == (ROOT / "crds/tbajobs.tba.dev.yaml").read_bytes()
