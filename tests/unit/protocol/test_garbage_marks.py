import pytest
from support.bucket import Bucket

from tba.contracts.records import CheckpointManifest, IngestState, ShardId, SnapshotManifest
from tba.protocol.garbage import Retention, View, garbage, kept_checkpoints
from tba.protocol.latest import first

RULES = Retention(keep_last=1, keep_every=None, keep_best=0, retain_versions=1, grace_seconds=10.0, delete_shards=True)


def view(bucket, checkpoint, **changes):
    manifest = CheckpointManifest.model_validate_json(bucket.store.objects[checkpoint].data)
    fields = {
        "latest": bucket.latest, "chain": {checkpoint: manifest}, "snapshots": {},
        "references": frozenset(), "pins": frozenset(), "objects": list(bucket.store.list_after("")), "now": 1020.0,
    }  # fmt: skip
    return View(**{**fields, **changes})


def test_a_shard_is_marked_once_listed_and_unheld():
    bucket = Bucket()
    shard, path = bucket.shard(0)
    checkpoint = bucket.checkpoint(1, ingest=IngestState(intervals={shard.incarnation: [(0, 1)]}))
    seen = view(bucket, checkpoint)
    assert kept_checkpoints(seen, RULES) == [checkpoint]
    assert garbage(seen, RULES, {checkpoint: [], "": []}) == [path]
    assert garbage(seen, RULES, {checkpoint: [ShardId(*shard)], "": []}) == []
    assert garbage(view(bucket, checkpoint, now=1009.0), RULES, {checkpoint: [], "": []}) == []
    assert garbage(view(bucket, checkpoint, chain_broken=True), RULES, None) == []


def test_deleting_shards_without_knowing_every_buffer_is_refused():
    bucket = Bucket()
    checkpoint = bucket.checkpoint(1)
    for held in (None, {}, {checkpoint: []}, {"": []}):
        with pytest.raises(ValueError, match="held must name the shards"):
            garbage(view(bucket, checkpoint), RULES, held)


def test_foreign_keys_and_a_run_that_has_published_nothing_are_left_alone():
    bucket = Bucket()
    checkpoint = bucket.checkpoint(1)
    for foreign in (
        "weights/readme.txt",
        "checkpoints/x/y",
        "shards/0000000001/note",
        "metrics/000001/0000000000.jsonl",
    ):
        bucket.store.put_once(foreign, b"x")
    assert garbage(view(bucket, checkpoint), RULES, {checkpoint: [], "": []}) == []
    assert garbage(view(bucket, checkpoint, latest=first("0" * 32), chain={}), RULES, None) == []


def test_manifests_are_marked_before_what_they_name():
    bucket = Bucket()
    manifests = [bucket.snapshot(version) for version in range(1, 5)]
    checkpoint = bucket.checkpoint(4)
    records = {m: SnapshotManifest.model_validate_json(bucket.store.objects[m].data) for m in manifests}
    seen = view(bucket, checkpoint, snapshots=records)
    marked = garbage(seen, RULES, {checkpoint: [], "": []})
    assert marked[:3] == manifests[:3] and len(marked) == 6
