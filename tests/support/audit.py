"""Counts what a finished run ingested against what its bucket holds: the answer to "was anything lost or doubled"."""

from collections import Counter
from dataclasses import dataclass

import torch

from tba.contracts.keys import SHARDS, ShardKey
from tba.contracts.records import TrajectoryId
from tba.shards import decode_shard
from tba.store import ObjectStore
from tba.trainer.replay import read_recorded, replay, weights_that_differ


@dataclass(frozen=True)
class Audit:
    """Multisets of trajectory ids."""

    ingested: Counter[TrajectoryId]
    in_bucket: Counter[TrajectoryId]

    @property
    def lost(self) -> set[TrajectoryId]:
        return set(self.in_bucket) - set(self.ingested)

    @property
    def doubled(self) -> set[TrajectoryId]:
        return {i for i, n in self.ingested.items() if n > 1}


def rows_of(store: ObjectStore, path: str) -> list[TrajectoryId]:
    key = ShardKey.parse(path)
    return [
        TrajectoryId(key.incarnation, key.seq, row)
        for row in range(len(decode_shard(store.get(path).data, run_id=None)))
    ]


def audit(store: ObjectStore) -> Audit:
    """Ids of the surviving ingest log, and ids of every shard in the bucket."""
    recorded = read_recorded(store)
    ingested: Counter[TrajectoryId] = Counter()
    for entry in recorded.entries:
        if entry.key and entry.quarantined is None:
            ingested.update(rows_of(store, entry.key))
    in_bucket: Counter[TrajectoryId] = Counter()
    for info in store.list_after(SHARDS):
        in_bucket.update(rows_of(store, info.key))
    return Audit(ingested, in_bucket)


def weights_differ(store: ObjectStore) -> list[str]:
    """Names of tensors that differ, in any bit, between the newest checkpoint and an uninterrupted replay."""
    torch.set_num_threads(1)
    differing = weights_that_differ(store, replay(store))
    assert differing is not None, "the replay ended at another step than the checkpoint"
    return differing
