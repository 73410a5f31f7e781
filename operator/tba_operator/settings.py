"""The operator's own settings, read from the environment that the chart writes."""

from collections.abc import Callable, Mapping
from typing import Any

from tba.contracts.errors import UserError
from tba_operator.world import Settings


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Variables that are absent or empty keep their defaults.

    Raises: UserError naming every variable that cannot be read.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for variable, (field, parse) in VARIABLES.items():
        text = environment.get(variable, "").strip()
        if not text:
            continue
        try:
            values[field] = parse(text)
        except ValueError as error:
            problems.append(f"  {variable}: {error}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(f"environment: {count}\n" + "\n".join(problems))
    return Settings(**values)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def _labels(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in _names(text):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"must be NAME=VALUE,NAME=VALUE, got {pair!r}; write for example team=ml")
        found[name] = value
    return found


def _flag(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError(f"must be true or false, got {text!r}")
    return known[text.lower()]


def _seconds(text: str) -> float:
    value = _number(text, float)
    if not 0 < value < float("inf"):
        raise ValueError(f"must be a number of seconds > 0, got {text!r}")
    return value


def _rate(text: str) -> float:
    value = _number(text, float)
    if not 0 < value < float("inf"):
        raise ValueError(f"must be a number > 0, got {text!r}")
    return value


def _count(text: str) -> int:
    value = _number(text, int)
    if value < 1:
        raise ValueError(f"must be >= 1, got {text!r}")
    return value


def _port(text: str) -> int:
    # A Service called tba-http makes the kubelet set TBA_HTTP_PORT=tcp://… in every pod of its namespace.
    hint = "; set enableServiceLinks: false on the operator's pod" if "://" in text else ""
    value = _number(text, int, hint)
    if not 0 <= value <= 65535:
        raise ValueError(f"must be a port, 0 to 65535, got {text!r}")
    return value


def _number(text: str, kind: type[int] | type[float], hint: str = "") -> Any:
    try:
        return kind(text)
    except ValueError:
        word = "whole number" if kind is int else "number"
        raise ValueError(f"must be a {word}, got {text!r}{hint}") from None


VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "TBA_NAMESPACE": ("namespace", str),
    "TBA_WATCH_NAMESPACES": ("watch_namespaces", _names),
    "TBA_TRAINER_IMAGE": ("trainer_image", str),
    "TBA_SEARCHER_IMAGE": ("searcher_image", str),
    "TBA_IMAGE_PULL_SECRETS": ("image_pull_secrets", _names),
    "TBA_NETWORK_POLICY": ("network_policy", _flag),
    "TBA_METRICS_NAMESPACE_LABELS": ("metrics_namespace_labels", _labels),
    "TBA_RESYNC_SECONDS": ("resync_seconds", _seconds),
    "TBA_PROGRESS_SECONDS": ("progress_seconds", _seconds),
    "TBA_PROGRESS_THROUGH_API": ("progress_through_api", _flag),
    "TBA_WORKERS": ("workers", _count),
    "TBA_REQUESTS_PER_SECOND": ("requests_per_second", _rate),
    "TBA_REQUEST_BURST": ("request_burst", _count),
    "TBA_HTTP_PORT": ("http_port", _port),
    "TBA_IDENTITY": ("identity", str),
    "TBA_LEASE_NAME": ("lease_name", str),
}
"""Variable -> (field of Settings, how its text is read). The chart's Deployment sets each."""
