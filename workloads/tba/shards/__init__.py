"""Shards: immutable objects of trajectories, from searcher to trainer (system.md §3, §4)."""

from tba.shards.batch import ShardBatch
from tba.shards.codec import decode_shard, encode_shard

__all__ = ["ShardBatch", "decode_shard", "encode_shard"]
