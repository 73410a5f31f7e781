"""Counts what a finished run ingested against what its bucket holds: the answer to "was anything lost or doubled"."""

from collections import Counter
from dataclasses import dataclass

import torch

from tba.contracts.config import LiveConfig
from tba.contracts.keys import LATEST, SHARDS, ShardKey
from tba.contracts.records import Latest, TrajectoryId
from tba.shards import decode_shard
from tba.store import ObjectStore
from tba.trainer.checkpoint import read_checkpoint
from tba.trainer.replay import read_recorded, replay


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


def weights_differ(store: ObjectStore, live: LiveConfig) -> list[str]:
    """Names of tensors that differ, in any bit, between the newest checkpoint and an uninterrupted replay."""
    torch.set_num_threads(1)
    learner = replay(store, live)
    latest = Latest.model_validate_json(store.get(LATEST).data)
    assert latest.checkpoint is not None
    _, state = read_checkpoint(store, latest.checkpoint)
    replayed = learner.policy.master_state()
    return [n for n, t in state.tensors["master"].items() if not torch.equal(replayed[n], t)]
