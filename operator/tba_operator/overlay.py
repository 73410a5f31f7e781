"""A user's `podTemplate` laid over our pod: as Kubernetes merges templates, but for plain dicts and without errors.

Mappings merge deeply and the user's value wins; null removes ours. Lists whose entries have a key merge by it, lists of
`_APPENDED` grow, every other list is replaced. What makes no sense is passed on: the API server names the field.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_KEYS = {
    "claims": "name",
    "containers": "name",
    "env": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "sysctls": "name",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_APPENDED = ("envFrom", "tolerations")
_WHOLE = ("env",)
"""Entries that are replaced, not merged: `value` and `valueFrom` exclude each other."""
_RETAIN = ("volumes",)
"""Entries that keep the fields of the user's entry only: a volume has one source."""
_HANDLERS = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})
"""Of a probe or hook: naming one drops the others."""


def overlay(base: Any, change: Any, field: str = "") -> Any:
    """`base` with `change` laid over it; `field` is the name under which both stand. Neither is altered."""
    if isinstance(change, Mapping):
        return _mapping(base if isinstance(base, Mapping) else {}, change)
    if isinstance(change, list | tuple):
        return _sequence(base if isinstance(base, list | tuple) else [], change, field)
    return change


def _mapping(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    dropped = _HANDLERS - change.keys() if _HANDLERS & change.keys() else frozenset()
    merged = {name: value for name, value in base.items() if name not in dropped}
    for name, value in change.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = overlay(merged.get(name), value, name)
    return merged


def _sequence(base: Sequence[Any], change: Sequence[Any], field: str) -> list[Any]:
    given = [item for item in change if item is not None]
    if field in _KEYS:
        return _by_key(base, given, field)
    plain = [overlay(None, item) for item in given]
    if field in _APPENDED:
        return [*base, *(item for item in plain if item not in base)]
    return plain


def _by_key(base: Sequence[Any], change: Sequence[Any], field: str) -> list[Any]:
    """In the order of `base`, then of `change`; of two entries of one key the later is laid over the earlier."""
    merged: list[Any] = []
    places: dict[str | int, int] = {}
    for item in [*base, *change]:
        key, plain = _key(item, field), overlay(None, item)
        if key is None:
            merged += [plain] if plain not in merged else []
        elif key not in places:
            places[key] = len(merged)
            merged.append(plain)
        else:
            merged[places[key]] = _entry(merged[places[key]], item, field)
    return merged


def _key(item: Any, field: str) -> str | int | None:
    key = item.get(_KEYS[field]) if isinstance(item, Mapping) else None
    return key if isinstance(key, str | int) else None


def _entry(base: Mapping[str, Any], change: Mapping[str, Any], field: str) -> dict[str, Any]:
    merged = overlay(None if field in _WHOLE else base, change)
    return {name: value for name, value in merged.items() if name in change} if field in _RETAIN else merged
