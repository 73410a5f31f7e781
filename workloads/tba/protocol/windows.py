"""Which shards to list at a poll, so that every shard is found and pages grow with shards alone.

```
shards/0 ─────────────────── lowest_unswept ──────────── commit ─►   key order = window order
│ slow sweep: a cursor, one   │ tail: listed whole at every poll    │
│ page a poll, wraps around   │ (newest windows + what closed since)│
```
A searcher uploads under the newest `commit` it has seen, but its key is fixed at the first attempt: after an outage its
spool delivers shards into windows that were listed long ago. So nothing is ever assumed to be finished:

* **Tail.** Every poll lists all windows from `lowest_unswept` on with one ranged listing. A window is *closed* when
  `commit` has moved past it by 2 and that has been known for `linger_seconds`, which lets slow searchers land in the
  tail. Once a tail listing has run to its end, windows closed before it began are swept: the next tail starts later.
  A resumed trainer starts from the checkpoint's value, so its first poll lists all it may have missed.
* **Slow sweep.** Windows below the tail are listed again and again in key order, at most `sweep_keys` keys a poll, for
  late shards: one that lands anywhere is found within one cycle. A starved trainer runs one whole cycle at once, once
  per starvation.

Cost of a poll: the shards of the tail, plus one page. It never depends on the number of searchers.
`lowest_unswept` only saves listing; that a shard is ingested once and only once rests on `IngestState.intervals`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, Self

from tba.contracts.keys import SHARDS, window_prefix

OPEN_WINDOWS = 2
"""Newest windows that searchers may still upload into without being late."""
SWEEP_KEYS = 1000
"""One LIST page."""
LINGER_SECONDS = 20.0
"""At least."""


class Keyed(Protocol):
    """Whatever a listing yields."""

    @property
    def key(self) -> str:
        """Object key."""
        ...


@dataclass(frozen=True, slots=True)
class ListPlan:
    """What to list at one poll."""

    tail_after: str
    """List every key of `shards/` behind this one."""
    closed_below: int
    """Windows below are closed now, hence swept once the tail has been listed to its end."""
    sweep_after: str | None
    """The slow sweep goes on behind this key; None: from the first."""
    sweep_before: str
    """The slow sweep ends at this key, where the tail begins."""
    sweep_keys: int | None
    """Most keys of the slow sweep; None: to its end; 0: nothing lies below the tail."""
    starved: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """What a plan brought, complete."""

    keys: tuple[str, ...]
    """Shard keys in key order within sweep and tail; most of them are known already."""
    sweep_after: str | None
    """Where the slow sweep stopped; None: it reached its end."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Position of listing. `lowest_unswept` is durable through checkpoints, the rest is of this process."""

    lowest_unswept: int = 0
    closed_below: int = 0
    """Windows below are closed."""
    sweep_after: str | None = None
    relieved: bool = False
    """The whole sweep of this starvation is done."""
    seen: tuple[tuple[int, float], ...] = ()
    """(commit, when first seen) ascending: all younger than the linger time, and the newest older one."""

    def observed(self, commit: int, now: float, *, linger_seconds: float = LINGER_SECONDS) -> Self:
        """Note the newest `commit` at time `now` (any clock that does not run backwards, seconds).

        Raises: ValueError if `commit` falls.
        """
        last = self.seen[-1][0] if self.seen else 0
        if commit < last:
            raise ValueError(f"commit never falls, got {commit} after {last}: latest has been overwritten")
        seen = self.seen if commit == last else (*self.seen, (commit, now))
        ripe = [i for i, (_, since) in enumerate(seen) if now - since >= linger_seconds]
        seen = seen[ripe[-1] :] if ripe else seen
        closed = seen[0][0] - OPEN_WINDOWS + 1 if ripe else 0
        return replace(self, seen=seen, closed_below=max(self.closed_below, closed))

    def plan(self, *, starved: bool, sweep_keys: int = SWEEP_KEYS) -> ListPlan:
        """What to list now. `starved`: the trainer waits for data."""
        whole = starved and not self.relieved
        return ListPlan(
            tail_after=tail_after(self.lowest_unswept),
            closed_below=self.closed_below,
            sweep_after=None if whole else self.sweep_after,
            sweep_before=window_prefix(self.lowest_unswept),
            sweep_keys=0 if self.lowest_unswept == 0 else None if whole else sweep_keys,
            starved=starved,
        )

    def listed(self, plan: ListPlan, listing: Listing) -> Self:
        """Position after `plan` has been carried out without an error."""
        return replace(
            self,
            lowest_unswept=max(self.lowest_unswept, plan.closed_below),
            sweep_after=listing.sweep_after,
            relieved=plan.starved and (self.relieved or plan.sweep_keys in (None, 0)),
        )

    def durable(self, pending_windows: Iterable[int]) -> int:
        """`lowest_unswept_window` for a checkpoint while listed shards of `pending_windows` are not ingested yet."""
        return min(self.lowest_unswept, min(pending_windows, default=self.lowest_unswept))


def linger_for(poll_interval_seconds: float) -> float:
    """Linger seconds by how often searchers look at `latest`: what each has seen last may be older by one and a half
    such intervals, for they are jittered, and to it every window of that time is the newest."""
    return max(LINGER_SECONDS, 2.0 * poll_interval_seconds)


def tail_after(window: int) -> str:
    """A key before all shards of `window` and behind those of earlier ones, for a ranged listing.

    Not the bare prefix: SeaweedFS (4.48, tried) takes it for a listed directory and skips the whole window.
    """
    return f"{window_prefix(window)}!"


def carry_out(plan: ListPlan, list_after: Callable[[str, str | None], Iterable[Keyed]]) -> Listing:
    """List what `plan` says with `list_after(prefix, after)`, which yields keys in order, lazily."""
    keys: list[str] = []
    stopped: str | None = None
    if plan.sweep_keys != 0:
        for listed in list_after(SHARDS, plan.sweep_after):
            if listed.key >= plan.sweep_before:
                break
            keys.append(listed.key)
            if plan.sweep_keys is not None and len(keys) >= plan.sweep_keys:
                stopped = listed.key
                break
    keys.extend(listed.key for listed in list_after(SHARDS, plan.tail_after))
    return Listing(tuple(keys), stopped)
