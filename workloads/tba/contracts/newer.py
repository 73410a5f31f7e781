"""Read what a newer release wrote, without what is new in it: an older operator works on beside newer images."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json

from tba.contracts.explain import field_of, models_within

T = TypeVar("T", bound=BaseModel)


def read_known(kind: type[T], data: bytes | str) -> T:
    """A record of JSON without the fields that this release does not know. Raises: ValueError."""
    return kind.model_validate(known_fields(kind, from_json(data)))


def known_fields(model: type[BaseModel], value: Any) -> Any:
    """`value` without the fields that `model` does not know, at any depth."""
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for name, inner in value.items():
        known, nested = _field(model, name)
        if not known:
            continue
        if nested is None:
            kept[name] = inner
        elif isinstance(inner, list):
            kept[name] = [known_fields(nested, item) for item in inner]
        else:
            kept[name] = known_fields(nested, inner)
    return kept


@lru_cache(maxsize=4096)  # names come from users
def _field(model: type[BaseModel], name: str) -> tuple[bool, type[BaseModel] | None]:
    """Whether the model has that field, and the model within it."""
    found = field_of(model, name)
    return found is not None, None if found is None else next(models_within(found[1].annotation), None)
