"""Whether an object in the API server lacks something that its manifest asks for. Pure."""

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

_QUANTITIES = frozenset({"limits", "requests", "sizeLimit", "storage", "divisor", "capacity"})
"""Fields at or below which values are quantities: the API server may write them in another unit."""
_SHARED = frozenset({"imagePullSecrets"})
"""Lists to which a platform may add entries of its own: ours have to be among them."""
_SELECTORS = frozenset({"matchLabels", "namespaceSelector", "podSelector", "selector"})
"""Fields of which nothing may be left over: what a selector asks for besides makes it select less."""
_FACTORS = {
    **{suffix: Decimal(1024) ** n for n, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    **{suffix: Decimal(1000) ** n for n, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    "m": Decimal(1) / 1000,
    "u": Decimal(1) / 1000**2,
    "n": Decimal(1) / 1000**3,
}


def differs(desired: Any, observed: Any) -> bool:
    """True if `desired` is no part of `observed`.

    Objects by subset, since the API server adds defaults, but selectors as a whole; lists by element and length, pull
    secrets by subset too; quantities by value. What is asked for empty or null may be absent.
    """
    return _differs(desired, observed, quantities=False)


def quantity(value: Any) -> Decimal | None:
    """A Kubernetes quantity (`500m`, `1Gi`, `1e3`, 2) as a number; null if it is none."""
    text = str(value)
    suffix = next((s for s in _FACTORS if text.endswith(s)), "")
    try:
        number = Decimal(text.removesuffix(suffix))
    except InvalidOperation:
        return None
    return number * _FACTORS.get(suffix, Decimal(1)) if number.is_finite() else None


def _differs(desired: Any, observed: Any, *, quantities: bool) -> bool:
    if desired is None:
        return False
    if isinstance(desired, Mapping):
        return _mapping_differs(desired, observed, quantities)
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _sequence_differs(desired, observed, quantities)
    if desired == "":
        return observed not in (None, "")
    if isinstance(desired, bool) or isinstance(observed, bool):
        return desired is not observed
    if desired == observed:
        return False
    wanted = quantity(desired) if quantities else None
    return wanted is None or wanted != quantity(observed)


def _mapping_differs(desired: Mapping[str, Any], observed: Any, quantities: bool) -> bool:
    present = observed if observed is not None else {}
    return not isinstance(present, Mapping) or any(
        _field_differs(name, value, present.get(name), quantities) for name, value in desired.items()
    )


def _field_differs(name: str, desired: Any, observed: Any, quantities: bool) -> bool:
    if name in _SHARED:
        return _is_missing(desired, observed)
    if name in _SELECTORS and differs(observed, desired):
        return True
    return _differs(desired, observed, quantities=quantities or name in _QUANTITIES)


def _is_missing(desired: Sequence[Any], observed: Sequence[Any] | None) -> bool:
    """Whether one of `desired` is not among `observed`."""
    return not all(any(not differs(one, other) for other in observed or ()) for one in desired)


def _sequence_differs(desired: Sequence[Any], observed: Any, quantities: bool) -> bool:
    present = observed if observed is not None else ()
    return (
        not isinstance(present, Sequence)
        or isinstance(present, str)
        or len(desired) != len(present)
        or any(_differs(d, o, quantities=quantities) for d, o in zip(desired, present, strict=True))
    )
