"""The CustomResourceDefinition, made from the pydantic models and the table of rules. hack/crd.py writes it out.

JobSpec, JobStatus ── model_json_schema ──► structural schema (no $ref, no unions, every default) + rules of a model
"""

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from tba.contracts.explain import models_within
from tba.contracts.job import JobSpec, TBAJob
from tba_operator.api import GROUP, KIND, PLURAL, VERSION, JobStatus
from tba_operator.rules import RULES, Rule

_OPAQUE = "x-kubernetes-preserve-unknown-fields"
_KEYED = {"env": "name", "imagePullSecrets": "name", "conditions": "type"}
"""Lists whose items are told apart by a key, so that two writers can each own some."""
_WIDE = ("bytes", "tokens", "trajectories", "generation")
"""Last words of the names of integers that may pass 2^31."""
_KEPT = ("type", "pattern", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum")
# What pydantic checks in code and a schema can say: free-form mappings with known keys, choices this release lacks.
_REFINED: dict[tuple[str, str], dict[str, Any]] = {
    ("Objective", "parameters"): {
        "type": "object",
        "properties": {
            "ratioAlpha": {
                "description": "Power of the weight, policy over sampler (searchers tell it then); none: 0.",
                "type": "number",
                "format": "double",
                "minimum": 0,
                "maximum": 1,
            },
            "ratioClip": {
                "description": "Bound of that weight; none: 1.",
                "type": "number",
                "format": "double",
                "minimum": 0,
                "exclusiveMinimum": True,
            },
            "baselineShift": {
                "description": "Reward by which every group's baseline is lowered; none: 0.",
                "type": "number",
                "format": "double",
                "minimum": 0,
            },
        },
    },
    ("ColocatedSearcher", "enabled"): {_OPAQUE: True, "enum": ["auto", True, False]},
}
_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Of", "integer", ".status.progress.totalSteps", 0),
    ("Reward", "number", ".status.progress.reward", 0),
    ("Ready", "integer", ".status.searcher.readyReplicas", 0),
    ("Desired", "integer", ".status.searcher.desiredReplicas", 0),
    ("Staleness", "number", ".status.progress.stalenessMean", 0),
    ("Idle%", "number", ".status.progress.trainerIdlePercent", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Degraded")].reason', 1),
    ("Eval", "number", ".status.progress.evalScore", 1),
)
"""(name, type, JSONPath, priority); priority 1 shows with `-o wide` only."""


def custom_resource_definition() -> dict[str, Any]:
    """What `kubectl apply` takes."""
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["tbaj"],
        "categories": ["tba"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [_version()]},
    }


def structural_schema(model: type[BaseModel], *, defaults: bool) -> dict[str, Any]:
    """A model as a structural schema; with `defaults`, each is spelled out in full, as rules rely on."""
    return _Schema(model, defaults).of_model(model)


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _root()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.searcher.replicas",
                "statusReplicasPath": ".status.searcher.replicas",
                "labelSelectorPath": ".status.searcher.selector",
            },
        },
        "selectableFields": [{"jsonPath": ".spec.managedBy"}],
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
            for name, kind, path, priority in _COLUMNS
        ],
    }


def _root() -> dict[str, Any]:
    return {
        "description": "One run of post-training by Trajectory Balance with Asynchrony: a trainer and its searchers.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(JobSpec, defaults=True),
            "status": structural_schema(JobStatus, defaults=False),
        },
        "x-kubernetes-validations": _rules_of(TBAJob),
    }


def _rules_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    return [_validation(rule) for rule in RULES if rule.model is model]


def _validation(rule: Rule) -> dict[str, Any]:
    found: dict[str, Any] = {"rule": rule.holds, "message": rule.message}
    if rule.message_expression:
        found["messageExpression"] = rule.message_expression
    if rule.field:
        found["fieldPath"] = f".{rule.field}"
    if rule.forbids_change:
        found["reason"] = "FieldValueForbidden"
    return found


class _Schema:
    """Conversion of one model and all within it."""

    def __init__(self, model: type[BaseModel], defaults: bool) -> None:
        self._defaults = defaults
        top = model.model_json_schema(by_alias=True)
        self._found = top.get("$defs", {}) | {model.__name__: top}
        self._models = {m.__name__: m for m in _all_within(model)}

    def of_model(self, model: type[BaseModel]) -> dict[str, Any]:
        found = self._found[model.__name__]["properties"]
        fields = {info.alias or name: (name, info) for name, info in model.model_fields.items()}
        node: dict[str, Any] = {"description": _one_line(model.__doc__), "type": "object"}
        if required := [alias for alias, (_, info) in fields.items() if info.is_required()]:
            node["required"] = required
        node["properties"] = {
            alias: self._of_field(model, name, info, found[alias]) for alias, (name, info) in fields.items()
        }
        if rules := _rules_of(model):
            node["x-kubernetes-validations"] = rules
        return node

    def _of_field(self, model: type[BaseModel], name: str, info: FieldInfo, found: dict[str, Any]) -> dict[str, Any]:
        alias = info.alias or name
        node = dict(_REFINED.get((model.__name__, alias)) or self._of_value(found))
        if node.get("type") == "integer":
            node["format"] = "int64" if name.rpartition("_")[2] in _WIDE else "int32"
        elif node.get("type") == "string" and name.endswith("_time"):
            node["format"] = "date-time"
        elif node.get("type") == "array":
            _tell_apart(node, _KEYED.get(alias))
        if info.description:
            node["description"] = _one_line(info.description)
        default = _default(info)
        if self._defaults and default is not None:
            node["default"] = default
            if {"type": "null"} in found.get("anyOf", ()):
                node["nullable"] = True  # null means something else than the default
        return _description_first(node)

    def _of_value(self, found: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in found:
            return self.of_model(self._models[found["$ref"].rpartition("/")[2]])
        if "anyOf" in found:
            branches = [b for b in found["anyOf"] if b.get("type") != "null"]
            return self._of_value(branches[0]) if len(branches) == 1 else _of_union(branches)
        node = {key: found[key] for key in _KEPT if key in found}
        choices = found.get("enum") or ([found["const"]] if "const" in found else [])
        if choices:
            node["enum"] = list(choices)
        node |= _exclusive_bounds(found)
        if found.get("type") == "number":
            node["format"] = "double"
        elif found.get("type") == "integer":
            node["format"] = "int32"
        elif found.get("type") == "array":
            # A tuple's items are alike: a structural schema has no other.
            node["items"] = self._of_value(found["items"] if "items" in found else found["prefixItems"][0])
            _tell_apart(node, None)
        elif found.get("type") == "object":
            node |= self._of_mapping(found)
        return node

    def _of_mapping(self, found: dict[str, Any]) -> dict[str, Any]:
        values = found.get("additionalProperties", True)
        if values is True:
            return {_OPAQUE: True}
        inner = self._of_value(values)
        keys = found.get("propertyNames", {}).get("enum")
        return {"properties": {key: inner for key in keys}} if keys else {"additionalProperties": inner}


def _of_union(branches: list[dict[str, Any]]) -> dict[str, Any]:
    """A value of several types has none: bounds judge numbers, the pattern judges text, and all else is shut out."""
    if all("const" in b or "enum" in b or b["type"] == "boolean" for b in branches):
        return {_OPAQUE: True, "enum": [choice for b in branches for choice in _choices(b)]}
    texts = [_pattern(b) for b in branches if b["type"] == "string"]
    number = next(b for b in branches if b["type"] in ("integer", "number"))
    bounds = {key: number[key] for key in ("minimum", "maximum") if key in number} | _exclusive_bounds(number)
    other = {"maxItems": 0, "maxProperties": 0, "not": {"enum": [True, False]}}
    return {_OPAQUE: True, "pattern": "|".join(texts), **bounds, **other}


def _choices(branch: dict[str, Any]) -> list[Any]:
    if branch["type"] == "boolean":
        return [True, False]
    return branch.get("enum") or [branch["const"]]


def _pattern(branch: dict[str, Any]) -> str:
    return branch.get("pattern") or f"^{branch['const']}$"


def _exclusive_bounds(found: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema says `exclusiveMinimum: 0`; OpenAPI 3.0 says `minimum: 0, exclusiveMinimum: true`."""
    bounds: dict[str, Any] = {}
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive not in found:
            continue
        if found["type"] == "integer":  # 2^31 itself would be no int32
            bounds[inclusive] = found[exclusive] + (1 if inclusive == "minimum" else -1)
        else:
            bounds |= {inclusive: found[exclusive], exclusive: True}
    return bounds


def _tell_apart(node: dict[str, Any], key: str | None) -> None:
    if key is None:
        node["x-kubernetes-list-type"] = "atomic"
        return
    items = {k: v for k, v in node["items"].items() if k != "additionalProperties"}
    properties = items.get("properties") or {key: {"type": "string", "minLength": 1}}
    items |= {"required": items.get("required", [key]), "properties": properties}
    node |= {"items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def _default(info: FieldInfo) -> Any:
    """As JSON, without nulls; null if there is none or it is null: the field is then simply left out."""
    if info.is_required():
        return None
    value = info.get_default(call_default_factory=True, validated_data={})
    return to_jsonable_python(value, by_alias=True, exclude_none=True)


def _description_first(node: dict[str, Any]) -> dict[str, Any]:
    return {key: node[key] for key in ("description", "type") if key in node} | node


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _all_within(model: type[BaseModel]) -> list[type[BaseModel]]:
    found, pending = [], [model]
    while pending:
        current = pending.pop()
        if current not in found:
            found.append(current)
            pending += [m for info in current.model_fields.values() for m in models_within(info.annotation)]
    return found
