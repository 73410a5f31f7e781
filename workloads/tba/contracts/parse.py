"""Parse a record of the bucket: one that is damaged, or of another release, is told in one line."""

from typing import TypeVar

from pydantic import ValidationError

from tba.contracts.base import Contract
from tba.contracts.errors import CorruptObject
from tba.contracts.explain import first_fault

T = TypeVar("T", bound=Contract)


def parse_object(kind: type[T], key: str, data: bytes | str) -> T:
    """The record at `key`. Raises: CorruptObject with key, field, reason and remedy."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise CorruptObject(
            f"{key} cannot be parsed: {first_fault(error)}; restore it from a copy, or use the release that wrote it"
        ) from error
