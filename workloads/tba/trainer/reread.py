"""Reads the buffer's rows again from their shards when a trainer resumes.

A shard that has gone or rotted costs its rows and nothing else: the run goes on without them, and says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tba.contracts.records import Lineage, ShardId
from tba.store import NotFound, ObjectStore
from tba.trainer.buffer import NewRows
from tba.trainer.ingest import READ_AHEAD, READ_THREADS, Binding, read_shard
from tba.trainer.learner import new_rows
from tba.trainer.readahead import map_ahead


@dataclass(frozen=True, slots=True)
class LostShard:
    """A shard whose rows the checkpoint's buffer held and the restored one does not."""

    key: str
    num_rows: int
    reason: str


class ShardReader:
    """Reads shards of a checkpoint's buffer, several at a time."""

    def __init__(self, store: ObjectStore, bound: Binding, paths: dict[str, list[list[Any]]], lineage: Lineage) -> None:
        """`paths`: incarnation -> [[seq, key], ...]."""
        self._store = store
        self._bound = bound
        self._paths = {ShardId(inc, int(seq)): str(path) for inc, items in paths.items() for seq, path in items}
        self._lineage = lineage
        self._reasons: dict[ShardId, str] = {}

    def __call__(self, shards: Sequence[ShardId]) -> Iterator[NewRows]:
        """Rows of each shard that can be read, in order; `lost` explains the others. Raises: StoreUnavailable."""
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="restore") as pool:
            for shard, read in zip(shards, map_ahead(pool, self._read, shards, ahead=READ_AHEAD), strict=True):
                if isinstance(read, NewRows):
                    yield read
                else:
                    self._reasons[shard] = read

    def lost(self, missing: Mapping[ShardId, int]) -> list[LostShard]:
        """What to tell of shards that gave the buffer none of the rows it wants; `missing`: how many those are."""
        return [
            LostShard(
                self._paths.get(shard, f"{shard.incarnation}/{shard.seq}"),
                num_rows,
                f"{self._reasons.get(shard, 'lacks rows that it had')}: the resumed buffer goes on without it",
            )
            for shard, num_rows in sorted(missing.items())
        ]

    def _read(self, shard: ShardId) -> NewRows | str:
        """In a reader's thread: the rows, or why there are none."""
        if shard not in self._paths:
            return "the checkpoint does not say where it is"
        try:
            arrival = read_shard(self._store, self._paths[shard], self._bound)
        except NotFound:
            return "gone"
        return arrival.reason if arrival.batch is None else new_rows(arrival.batch, self._lineage)
