"""Which shards have been ingested, as intervals of `seq` per incarnation.

Intervals are half-open [start, end), sorted, disjoint and never adjacent, so that equal sets have equal records.
"""

from bisect import bisect_right
from collections.abc import Iterable

from tba.contracts.records import IngestState, ShardId

_Intervals = list[tuple[int, int]]
_END = float("inf")


class IngestSet:
    """Mutable form of the intervals for bulk work; one insertion costs O(log n) plus a list shift.

    Converts to and from `IngestState`. Never shares lists with the state it came from.
    """

    __slots__ = ("_intervals",)

    def __init__(self, state: IngestState | None = None) -> None:
        """Raises: ValueError if the intervals of `state` are not sorted, disjoint and non-adjacent."""
        source = {} if state is None else state.intervals
        for incarnation, intervals in source.items():
            _check(incarnation, intervals)
        self._intervals: dict[str, _Intervals] = {name: list(intervals) for name, intervals in source.items()}

    def __contains__(self, shard_id: ShardId) -> bool:
        return _covers(self._intervals.get(shard_id.incarnation, ()), shard_id.seq)

    def __len__(self) -> int:
        return sum(end - start for intervals in self._intervals.values() for start, end in intervals)

    def add(self, shard_id: ShardId) -> None:
        """Raises: ValueError if the shard has been ingested before."""
        _insert(self._intervals.setdefault(shard_id.incarnation, []), shard_id)

    def state(self, lowest_unswept_window: int) -> IngestState:
        """The record of this set."""
        copied = {name: list(intervals) for name, intervals in self._intervals.items() if intervals}
        return IngestState(intervals=copied, lowest_unswept_window=lowest_unswept_window)


def contains(state: IngestState, shard_id: ShardId) -> bool:
    """Whether the shard has been ingested (or quarantined, which counts as ingested)."""
    return _covers(state.intervals.get(shard_id.incarnation, ()), shard_id.seq)


def with_ingested(state: IngestState, *shard_ids: ShardId) -> IngestState:
    """A copy that also holds `shard_ids`; lists of other incarnations are shared, so a call costs one dict copy.

    Raises: ValueError if one of them is in already: a shard trained twice is a bug.
    """
    intervals = dict(state.intervals)
    fresh: set[str] = set()
    for shard_id in shard_ids:
        if shard_id.incarnation not in fresh:
            intervals[shard_id.incarnation] = list(intervals.get(shard_id.incarnation, ()))
            fresh.add(shard_id.incarnation)
        _insert(intervals[shard_id.incarnation], shard_id)
    # Not validated again: the insertion keeps the invariants, and validation would copy every list.
    return IngestState.model_construct(intervals=intervals, lowest_unswept_window=state.lowest_unswept_window)


def count(state: IngestState) -> int:
    """Number of ingested shards."""
    return sum(end - start for intervals in state.intervals.values() for start, end in intervals)


def ingested_ids(state: IngestState) -> Iterable[ShardId]:
    """Every ingested identity, incarnation by incarnation, in order of `seq`."""
    for incarnation, intervals in state.intervals.items():
        for start, end in intervals:
            yield from (ShardId(incarnation, seq) for seq in range(start, end))


def _covers(intervals: _Intervals | tuple[()], seq: int) -> bool:
    at = bisect_right(intervals, (seq, _END))
    return at > 0 and seq < intervals[at - 1][1]


def _insert(intervals: _Intervals, shard_id: ShardId) -> None:
    seq = shard_id.seq
    if seq < 0:
        raise ValueError(f"seq must be >= 0, got {seq} of {shard_id.incarnation}: take it from a parsed shard key")
    at = bisect_right(intervals, (seq, _END))
    before = intervals[at - 1] if at else None
    if before is not None and seq < before[1]:
        raise ValueError(
            f"a shard is ingested once, got {shard_id.incarnation} seq {seq} again: ask contains() before ingesting"
        )
    joins_before = before is not None and before[1] == seq
    joins_after = at < len(intervals) and intervals[at][0] == seq + 1
    start = before[0] if before is not None and joins_before else seq
    end = intervals[at][1] if joins_after else seq + 1
    intervals[at - joins_before : at + joins_after] = [(start, end)]


def _check(incarnation: str, intervals: _Intervals) -> None:
    last = -1
    for start, end in intervals:
        if not last < start < end:
            raise ValueError(
                f"intervals must be sorted, disjoint, non-adjacent and not empty, got {intervals[:8]} "
                f"for incarnation {incarnation}: the checkpoint is corrupt, fall back to its parent"
            )
        last = end
