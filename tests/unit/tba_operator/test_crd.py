"""The CustomResourceDefinition that the models give; a real API server judges it in test_crd_admission.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from support.jobs import SMALLEST
from support.structural import admit

from tba.contracts.config import Optimizer
from tba.contracts.job import Container, JobSpec, TBAJob
from tba_operator.api import MANAGED_BY, JobStatus
from tba_operator.crd import custom_resource_definition, structural_schema

ROOT = Path(__file__).parents[3]
CRD = custom_resource_definition()
VERSION = CRD["spec"]["versions"][0]
SPEC = VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]
STATUS = VERSION["schema"]["openAPIV3Schema"]["properties"]["status"]


def at(path, schema=SPEC):
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def nodes(schema, path="spec"):
    """Every schema node below, with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for inside in ("items", "additionalProperties"):
        if inside in schema:
            yield from nodes(schema[inside], f"{path}[]")


@pytest.mark.parametrize("schema", [SPEC, STATUS], ids=["spec", "status"])
def test_every_node_is_structural(schema):
    for path, node in nodes(schema):
        assert not {"$ref", "$defs", "title", "prefixItems", "const"} & set(node), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert "type" in node or node.get("x-kubernetes-preserve-unknown-fields"), path
        assert node.get("exclusiveMinimum", True) is True, path
        if node.get("type") == "array":
            assert "items" in node, path
            assert "x-kubernetes-list-type" in node, path
        if node.get("type") == "integer":
            assert node["format"] in ("int32", "int64"), path


def test_every_field_of_the_spec_has_a_description():
    undescribed = {
        path.rpartition(".")[2] for path, node in nodes(SPEC) if "[]" not in path and "description" not in node
    }
    assert undescribed == {"limits", "requests", "labels", "annotations"}


def test_defaults_filled_in_by_the_schema_are_those_of_the_models():
    stored = admit(VERSION["schema"]["openAPIV3Schema"], SMALLEST)
    by_models = TBAJob.model_validate(SMALLEST).spec.model_dump(mode="json", exclude_none=True)
    assert stored["spec"] == by_models
    assert stored["spec"]["searcher"]["replicas"] == 1  # /scale needs a number
    assert stored["spec"]["managedBy"] == MANAGED_BY


def test_a_section_has_its_default_in_full_because_rules_read_inside_of_it():
    assert at("objective")["default"]["reference"] == {"type": "Fixed", "scorer": "Trainer"}


def test_null_is_kept_only_where_it_means_something_else_than_the_default():
    nullable = {path for path, node in nodes(SPEC) if node.get("nullable")}
    prompts = ("spec.task.prompts.answerField", "spec.task.evaluation.prompts.answerField")
    assert nullable == {"spec.buffer.maxReplayRatio", "spec.objective.optimizer.maxGradNorm", *prompts}


def test_status_has_no_defaults_and_its_conditions_are_told_apart_by_type():
    assert not [path for path, node in nodes(STATUS) if "default" in node]
    conditions = at("conditions", STATUS)
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert conditions["items"]["required"] == ["type", "status", "reason", "lastTransitionTime"]
    assert at("startTime", STATUS)["format"] == "date-time"
    assert set(STATUS["properties"]) == {f.alias for f in JobStatus.model_fields.values()}


def test_a_status_that_the_models_write_has_no_field_that_the_schema_lacks():
    dumped = JobStatus().dump()
    for name, value in dumped.items():
        assert set(value) <= set(at(name, STATUS)["properties"]) if isinstance(value, dict) else True


def test_bounds_and_choices_come_from_the_models():
    beta, seed, dtype = at("objective.beta"), at("objective.seed"), at("model.dtype")
    assert (beta["minimum"], beta["exclusiveMinimum"], beta["default"]) == (0, True, 0.05)
    assert (seed["maximum"], seed["format"]) == (2**31 - 1, "int32")
    assert dtype["enum"] == ["bfloat16", "float32"]
    assert at("task.reward.memoryBytes")["format"] == "int64"
    betas = at("objective.optimizer.betas")
    assert (betas["minItems"], betas["maxItems"], betas["items"]["maximum"]) == (2, 2, 1)


def test_a_value_of_several_types_is_bounded_for_each():
    norm = at("objective.optimizer.maxGradNorm")
    assert "type" not in norm
    assert (norm["pattern"], norm["minimum"], norm["exclusiveMinimum"]) == ("^auto$", 0, True)
    assert at("trainer.colocatedSearcher.enabled")["enum"] == ["auto", True, False]


def test_environment_variables_are_told_apart_by_name_and_keep_every_field():
    env = at("trainer.env")
    assert env["x-kubernetes-list-map-keys"] == ["name"]
    assert env["items"]["x-kubernetes-preserve-unknown-fields"]
    assert at("searcher.imagePullSecrets")["items"]["properties"] == {"name": {"type": "string", "minLength": 1}}


def test_the_spec_of_a_pod_template_is_opaque_and_its_metadata_is_not():
    assert at("trainer.podTemplate.spec")["x-kubernetes-preserve-unknown-fields"]
    assert set(at("trainer.podTemplate.metadata")["properties"]) == {"labels", "annotations"}
    assert set(at("trainer.resources")["properties"]) == {"limits", "requests"}


def test_parameters_of_the_objective_are_those_its_validator_knows():
    for name in at("objective.parameters")["properties"]:
        JobSpec.model_validate(SMALLEST["spec"] | {"objective": {"parameters": {name: 1}}})


def test_scale_reads_and_writes_searchers():
    scale = VERSION["subresources"]["scale"]
    assert at(scale["specReplicasPath"].removeprefix(".spec."))["type"] == "integer"
    assert at(scale["statusReplicasPath"].removeprefix(".status."), STATUS)["type"] == "integer"
    assert at(scale["labelSelectorPath"].removeprefix(".status."), STATUS)["type"] == "string"


def test_every_column_shows_a_field_that_exists():
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"]
        if path.startswith(".status.") and "[" not in path:
            assert at(path.removeprefix(".status."), STATUS)["type"] == column["type"]
    assert [c["name"] for c in VERSION["additionalPrinterColumns"] if c.get("priority")] == ["Reason", "Eval"]


def test_a_rule_names_a_field_that_exists():
    for path, node in nodes(SPEC):
        for rule in node.get("x-kubernetes-validations", ()):
            assert "fieldPath" not in rule or at(rule["fieldPath"][1:], node), path


def test_a_model_without_defaults_keeps_its_constraints():
    schema = structural_schema(Optimizer, defaults=False)
    assert "default" not in schema["properties"]["eps"]
    assert schema["properties"]["eps"]["exclusiveMinimum"]


def test_the_container_fields_of_both_roles_are_the_same():
    for info in Container.model_fields.values():
        assert at(f"trainer.{info.alias}") == at(f"searcher.{info.alias}")


def test_managed_by_of_the_models_is_the_controllers_own_name():
    assert MANAGED_BY in get_args(JobSpec.model_fields["managed_by"].annotation)


def test_the_committed_files_are_what_the_models_give_and_small_enough_to_apply():
    done = subprocess.run(
        [sys.executable, "hack/crd.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    written = ROOT / "crds/tbajobs.tba.dev.yaml"
    assert written.stat().st_size < 100_000
    assert yaml.safe_load(written.read_text(encoding="utf-8")) == json.loads(json.dumps(CRD))
    assert "{{" not in written.read_text(encoding="utf-8")  # the chart includes it
