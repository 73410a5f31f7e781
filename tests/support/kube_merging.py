"""How an API server puts an object and a change together: merge patch, and fields of server-side apply."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from tba_operator.kubeapi import Object

Path = tuple[str, ...]
"""Names of a field and those it lies in."""


def keyed(value: Any, name: str = "") -> Any:
    """A copy in which each list of conditions is a mapping by type: apply merges those, other lists are replaced."""
    if name == "conditions" and isinstance(value, list):
        return {condition["type"]: dict(condition) for condition in value}
    if isinstance(value, Mapping):
        return {key: keyed(inner, key) for key, inner in value.items()}
    return copy.deepcopy(value)


def listed(value: Any, name: str = "") -> Any:
    """Undoes `keyed`."""
    if name == "conditions" and isinstance(value, dict):
        return list(value.values())
    if isinstance(value, dict):
        return {key: listed(inner, key) for key, inner in value.items()}
    return value


def field_paths(value: Mapping[str, Any], at: Path = ()) -> Iterator[Path]:
    """Every field that is no object, or an empty one."""
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from field_paths(inner, (*at, name))
        else:
            yield (*at, name)


def remove_field(target: Object, path: Path) -> None:
    """Take a field out, and the objects that are empty without it."""
    name, rest = path[0], path[1:]
    if not rest:
        target.pop(name, None)
    elif isinstance(target.get(name), dict):
        remove_field(target[name], rest)
        if not target[name]:
            del target[name]


def overlaid(target: Object, body: Mapping[str, Any]) -> Object:
    """`target` itself with the fields of `body` in it."""
    for name, inner in body.items():
        if isinstance(inner, Mapping) and isinstance(target.get(name), dict):
            overlaid(target[name], inner)
        else:
            target[name] = inner
    return target


def patched(target: Object, change: Mapping[str, Any]) -> Object:
    """JSON merge patch."""
    target = copy.deepcopy(target)
    for name, inner in change.items():
        if inner is None:
            target.pop(name, None)
        elif isinstance(inner, Mapping):
            target[name] = patched(target.get(name) or {}, inner)
        else:
            target[name] = copy.deepcopy(inner)
    return target
