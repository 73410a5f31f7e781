"""How many searchers work now, from what the trainer heard of each of their processes."""

from collections.abc import Collection
from typing import Protocol

ALIVE_SECONDS = 60.0
"""A searcher process not heard of for so long is not counted."""


class Heard(Protocol):
    """A searcher process."""

    @property
    def searcher(self) -> str:
        """Its searcher's name, which a process that replaces it has too."""
        ...

    @property
    def first_seen(self) -> float:
        """When its first shard came, Unix seconds."""
        ...

    @property
    def last_seen(self) -> float:
        """When its last shard came, Unix seconds."""
        ...


def searchers_alive(processes: Collection[Heard], now: float) -> int:
    """Processes heard of within `ALIVE_SECONDS`, without those that a later process of their name has replaced.

    Replaced: silent since that one began. Two that deliver side by side under one name are both at work.
    """
    begun: dict[str, float] = {}
    for process in processes:
        begun[process.searcher] = max(begun.get(process.searcher, 0.0), process.first_seen)
    return sum(
        now - p.last_seen <= ALIVE_SECONDS and (p.last_seen > (start := begun[p.searcher]) or p.first_seen == start)
        for p in processes
    )
