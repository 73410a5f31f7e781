"""Read a job file: YAML, `--set` overrides, validation, relative file:// URIs made absolute."""

import copy
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tba.contracts.errors import UserError
from tba.contracts.explain import closest, explain, field_names, field_of, models_within
from tba.contracts.job import JobSpec, TBAJob


class _Loader(yaml.SafeLoader):
    """Safe YAML where a key that stands twice is an error and 1e-5 is a number."""


_Loader.add_implicit_resolver(  # YAML 1.1 reads 1e-5 as a string; every Go and YAML 1.2 reader as a number
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:  # before `<<` brings keys of another mapping, which those of this one replace
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is not None and key in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} stands here and in line {seen[key]}", problem_mark=key_node.start_mark
            )
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_job(path: Path, overrides: list[str] | None = None) -> TBAJob:
    """The validated job of a YAML file, after `overrides` of the form `spec.path=value` or `path=value`.

    Raises: UserError naming file and line (syntax) or field, got and remedy (content).
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: a job file must be a mapping, got {type(data).__name__}: start with apiVersion")
    for override in overrides or []:
        data = apply_override(data, override)
    try:
        job = TBAJob.model_validate(data)
    except ValidationError as error:
        raise explain(error, str(path)) from error
    return resolve_files(job, path.resolve().parent)


def read_yaml(path: Path) -> Any:
    """One YAML document. Raises: UserError with the line of a syntax error."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}. Pass the path of a job file") from error
    return _parse(text, str(path))


def apply_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `data` with one `path=value` set; `spec.` may be left out; the value is YAML.

    Raises: UserError for a path that is no field, naming the closest.
    """
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise UserError(f"--set must be path=value, got {override!r}: for example --set objective.totalSteps=5")
    parts = path.split(".")
    if parts[0] != "metadata":
        parts = ["spec", *_known_path(parts[1:] if parts[0] == "spec" else parts, path)]
    result = copy.deepcopy(data)
    place = result
    for key in parts[:-1]:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    place[parts[-1]] = _parse(text, f"--set {path}")
    return result


def resolve_files(job: TBAJob, base: Path) -> TBAJob:
    """The job with every relative file:// URI in it made absolute against `base`."""
    spec, fork = job.spec, job.spec.fork_from
    prompts, evaluation = spec.task.prompts, spec.task.evaluation
    held_out = evaluation.prompts
    task = spec.task.model_copy(
        update={
            "prompts": prompts.model_copy(update={"uri": absolute_uri(prompts.uri, base)}),
            "evaluation": evaluation.model_copy(
                update={"prompts": held_out and held_out.model_copy(update={"uri": absolute_uri(held_out.uri, base)})}
            ),
        }
    )
    absolute = {
        "task": task,
        "model": spec.model.model_copy(update={"uri": absolute_uri(spec.model.uri, base)}),
        "storage": spec.storage.model_copy(update={"uri": absolute_uri(spec.storage.uri, base)}),
        "fork_from": fork and fork.model_copy(update={"uri": absolute_uri(fork.uri, base)}),
    }
    return job.model_copy(update={"spec": spec.model_copy(update=absolute)})


def absolute_uri(uri: str | None, base: Path) -> str | None:
    """`file://x/y` becomes `file:///base/x/y`; everything else stays."""
    if uri is None or not uri.startswith("file://") or uri.startswith("file:///"):
        return uri
    return f"file://{(base / uri.removeprefix('file://')).resolve()}"


def _known_path(parts: list[str], given: str) -> list[str]:
    """The path in camelCase, checked against the schema as far as the schema goes."""
    model: type[BaseModel] | None = JobSpec
    path: list[str] = []
    for part in parts:
        if model is None:  # below a free-form mapping: parameters, resources, ...
            path.append(part)
            continue
        found = field_of(model, part)
        if found is None:
            near = closest(part, field_names(model))
            prefix = "".join(f"{p}." for p in path)
            remedy = f"did you mean {prefix}{near}?" if near else f"known: {', '.join(field_names(model)) or 'none'}"
            raise UserError(f"--set {given}: no field {part!r} in {'.'.join(['spec', *path])}; {remedy}")
        path.append(found[0])
        model = next(models_within(found[1].annotation), None)
        if model is None and part is not parts[-1] and "dict" not in str(found[1].annotation):
            raise UserError(f"--set {given}: {'.'.join(path)} has no fields below it; set it as a whole")
    return path


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise UserError(f"{where}: not valid YAML: {error.problem}. Correct this line or the one above") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{source}: not valid YAML: {error}") from error
