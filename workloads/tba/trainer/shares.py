"""Which rank stages and uploads which tensors: about as many bytes each, and the same answer everywhere. Pure."""

import heapq
from collections.abc import Mapping, Sequence


def assign(sizes: Mapping[str, int], owners: Sequence[int]) -> dict[str, int]:
    """The owner of each tensor, given bytes by name.

    Largest first, each to whoever has the least (of these the first in `owners`), so the largest share exceeds the
    mean by less than one tensor. The order of `sizes` does not matter. Source: Graham 1969, "Bounds on multiprocessing
    timing anomalies", longest processing time first.
    Raises: ValueError for no owner, or one that is named twice.
    """
    if not owners or len(set(owners)) != len(owners):
        raise ValueError(f"owners must be at least one rank, each once, got {list(owners)}")
    loads = [(0, place) for place in range(len(owners))]  # a heap already
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, place = loads[0]
        found[name] = owners[place]
        heapq.heapreplace(loads, (load + sizes[name], place))
    return found
