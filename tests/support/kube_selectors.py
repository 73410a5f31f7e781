"""Label and field selectors, as an API server reads them."""

from collections.abc import Mapping
from typing import Any

from tba_operator.kubeapi import Object


class Fields(dict[str, str]):
    """Fields of an object by dotted path, for field selectors."""

    def __init__(self, found: Object) -> None:
        super().__init__()
        self._found = found

    def get(self, path: str, default: Any = None) -> Any:
        value: Any = self._found
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, str) else default

    def __contains__(self, path: object) -> bool:
        return self.get(str(path)) is not None


def selected(selector: str | None, values: Mapping[str, str]) -> bool:
    """`a=b`, `a==b`, `a!=b`, `a`, `!a`, joined by commas."""
    for term in (selector or "").split(","):
        name, operator, value = _term(term)
        if operator == "=" and values.get(name) != value:
            return False
        if operator == "!=" and values.get(name) == value:
            return False
        if operator == "exists" and name not in values:
            return False
        if operator == "absent" and name in values:
            return False
    return True


def _term(term: str) -> tuple[str, str, str]:
    if "!=" in term:
        name, _, value = term.partition("!=")
        return name, "!=", value
    if "=" in term:
        name, _, value = term.partition("=")
        return name, "=", value.removeprefix("=")
    if term.startswith("!"):
        return term[1:], "absent", ""
    return term, "exists" if term else "", ""
