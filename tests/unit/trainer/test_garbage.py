from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bucket import Bucket
from support.memory_store import MemoryStore

from tba.contracts.config import Checkpoints, Storage, Sync
from tba.contracts.errors import Fenced, UserError
from tba.contracts.keys import CHECKPOINTS, WEIGHTS, pin_key
from tba.contracts.records import IngestState
from tba.protocol.garbage import Retention
from tba.trainer import garbage as sweeping
from tba.trainer.garbage import Onlooker, Sweeper

GRACE = 3600.0
KEEP = Retention(keep_last=1, keep_every=None, keep_best=0, retain_versions=2, grace_seconds=GRACE)


def sweep(bucket, retention=KEEP, **more):
    return Sweeper(bucket.store, bucket.committer).sweep(retention, **more)


def test_old_versions_go_once_superseded_for_the_grace_time_and_version_0_stays():
    bucket = Bucket()
    for version in range(5):
        bucket.store.clock = 1000.0 + version
        bucket.snapshot(version)
    # With two kept, version 1 was pushed out by version 3, at 1003, and version 2 by version 4, at 1004.
    bucket.store.clock = 1003.0 + GRACE - 0.5
    assert sweep(bucket).num_objects == 0
    bucket.store.clock = 1003.0 + GRACE
    assert (sweep(bucket).num_objects, bucket.folders(WEIGHTS)) == (2, ["0/1", "2/1", "3/1", "4/1"])
    bucket.store.clock += 1.0
    swept = sweep(bucket)
    assert (swept.num_objects, bucket.folders(WEIGHTS)) == (2, ["0/1", "3/1", "4/1"])
    assert swept.total_bytes > 1


def test_bases_of_live_deltas_references_and_the_wanted_evaluation_stay():
    bucket = Bucket()
    bucket.snapshot(0)
    anchor = bucket.snapshot(1)
    bucket.snapshot(2)
    reference = bucket.snapshot(3)
    bucket.snapshot(4, evaluation=True)
    bucket.snapshot(5)
    middle = bucket.snapshot(6, base=anchor)
    bucket.snapshot(7)
    bucket.snapshot(8, base=middle)
    bucket.store.clock += 2 * GRACE
    sweep(bucket, references=[reference])
    assert bucket.folders(WEIGHTS) == ["0/1", "1/1", "3/1", "4/1", "6/1", "7/1", "8/1"]
    assert not bucket.missing()


def test_what_a_delta_builds_on_goes_with_the_delta_and_not_before():
    bucket, one = Bucket(), replace(KEEP, retain_versions=1)
    bucket.snapshot(0)
    anchor = bucket.snapshot(1)
    first = bucket.snapshot(2, base=anchor)
    bucket.store.clock += 3 * GRACE
    bucket.snapshot(3, base=first)
    bucket.store.clock += 3 * GRACE
    assert sweep(bucket, one).num_objects == 0, "the newest delta needs all of it"
    bucket.snapshot(4)
    sweep(bucket, one)
    assert bucket.folders(WEIGHTS) == ["0/1", "1/1", "2/1", "3/1", "4/1"], "a slow reader may be at version 3"
    bucket.store.clock += GRACE
    sweep(bucket, one)
    assert bucket.folders(WEIGHTS) == ["0/1", "4/1"]


def test_uploads_in_flight_and_folders_of_a_later_epoch_are_never_touched():
    bucket = Bucket()
    for version in range(4):
        bucket.snapshot(version)
    bucket.checkpoint(3)
    bucket.snapshot(4, complete=False, commit=False)
    bucket.snapshot(5, commit=False)
    bucket.checkpoint(4, complete=False, commit=False)
    bucket.store.clock += 10 * GRACE
    old = bucket.committer
    assert Sweeper(bucket.store, old).sweep(KEEP).num_objects == 2, "version 1 alone"
    bucket.take_over()
    bucket.snapshot(1, complete=False, commit=False)
    with pytest.raises(Fenced):
        Sweeper(bucket.store, old).sweep(KEEP)
    assert sweep(bucket).num_objects == 0, "nothing of epoch 2 is published yet: 4/1 and 5/1 may still be its restore"
    assert {"4/1", "5/1", "1/2"} <= set(bucket.folders(WEIGHTS)) and "4/1" in bucket.folders(CHECKPOINTS)


def test_what_a_dead_trainer_left_unfinished_goes_after_the_next_one_has_published_for_the_grace_time():
    bucket = Bucket()
    bucket.snapshot(0)
    bucket.checkpoint(0)
    bucket.snapshot(7, complete=False, commit=False)
    bucket.checkpoint(7, complete=False, commit=False)
    bucket.store.clock += 10 * GRACE
    bucket.take_over()
    bucket.snapshot(0)
    bucket.checkpoint(1)
    assert sweep(bucket).num_objects == 0
    bucket.store.clock += GRACE
    sweep(bucket)
    assert bucket.folders(WEIGHTS) == ["0/1", "0/2"]
    assert bucket.folders(CHECKPOINTS) == ["1/2"]


def test_an_upload_that_still_goes_on_is_no_debris_however_long_ago_it_began():
    bucket = Bucket()
    begun = bucket.snapshot(7, complete=False, commit=False)
    bucket.take_over()
    bucket.snapshot(0)
    bucket.store.clock += 2 * GRACE
    bucket.store.put_once(begun.replace("manifest.json", "more.safetensors"), b"w")
    assert sweep(bucket).num_objects == 0


def test_what_an_unreadable_delta_builds_on_is_unknown_so_no_weights_are_swept():
    bucket = Bucket()
    made = [bucket.snapshot(version) for version in range(4)]
    newest = bucket.snapshot(4, base=made[1])
    whole, bucket.store.objects[newest].data = bucket.store.objects[newest].data, b"{"
    bucket.store.clock += 2 * GRACE
    assert sweep(bucket).num_objects == 0
    bucket.store.objects[newest].data = whole
    assert sweep(bucket).num_objects > 0


def test_what_the_newest_delta_builds_on_stays_while_its_manifest_is_gone():
    bucket = Bucket()
    made = [bucket.snapshot(version) for version in range(4)]
    newest = bucket.snapshot(4, base=made[1])
    gone = bucket.store.objects.pop(newest)
    bucket.store.clock += 2 * GRACE
    assert sweep(bucket).num_objects == 0, "somebody may restore it from a copy"
    bucket.store.objects[newest] = gone
    sweep(bucket)
    assert not bucket.missing()


def test_checkpoints_are_kept_by_number_interval_score_and_pin_and_stay_reachable():
    bucket = Bucket()
    scores = {10: 0.9, 20: 0.1, 30: 0.2, 40: 0.3, 50: 0.4, 60: 0.5, 70: 0.6}
    for step in scores:
        bucket.checkpoint(step, score=scores[step])
    bucket.store.put_once(pin_key(40), b"")
    bucket.store.clock += 2 * GRACE
    rules = Retention(keep_last=1, keep_every=50, keep_best=1, retain_versions=1, grace_seconds=GRACE)
    sweep(bucket, rules)
    assert bucket.restorable() == [70, 50, 40, 10], "fallback passes over what is gone by the manifests left behind"
    sweep(bucket, Retention(keep_last=1, keep_every=None, keep_best=0, retain_versions=1, grace_seconds=GRACE))
    assert bucket.restorable() == [70, 40]
    left = {int(key.split("/")[1]) for key in bucket.store.objects if key.startswith(CHECKPOINTS)}
    assert left == {70, 60, 50, 40}, "nothing is reached through the older ones any more"


@pytest.mark.parametrize("known", ["by a later checkpoint", "by the trainer alone"])
def test_the_best_checkpoint_is_the_one_of_the_evaluated_step_though_its_score_came_later(known):
    bucket = Bucket()
    bucket.checkpoint(10, score=0.1)
    bucket.checkpoint(20, score=0.9)
    bucket.checkpoint(30)  # the first that knows of step 20, and its own score is not known yet
    fresh = {} if known == "by a later checkpoint" else {30: 0.95}
    bucket.checkpoint(40)
    bucket.store.clock += 2 * GRACE
    sweep(bucket, replace(KEEP, keep_best=1), scores=fresh)
    assert bucket.restorable() == ([40, 20] if not fresh else [40, 30])


def test_the_second_best_stays_for_the_grace_time_after_it_has_become_the_third():
    bucket = Bucket()
    for step, score in ((5, 0.0), (10, 0.1), (20, 0.9)):
        bucket.checkpoint(step, score=score)
    bucket.store.clock += 2 * GRACE
    bucket.checkpoint(30, score=0.5)
    bucket.checkpoint(40)
    rules = replace(KEEP, keep_best=2)
    sweep(bucket, rules)
    assert bucket.restorable() == [40, 30, 20, 10], "the worst has been the third for long"
    bucket.store.clock += GRACE
    sweep(bucket, rules)
    assert bucket.restorable() == [40, 30, 20]


def test_a_pinned_checkpoint_stays_though_a_later_trainer_rolled_it_back_and_debris_of_its_step_does_not():
    bucket = Bucket()
    bucket.checkpoint(10)
    bucket.checkpoint(20, commit=False)
    bucket.checkpoint(20, commit=False, complete=False)
    bucket.store.put_once(pin_key(20), b"")
    bucket.take_over()
    bucket.checkpoint(30)
    bucket.store.clock += 2 * GRACE
    assert sweep(bucket).num_objects == 3, "step 10 and the data of the unfinished one"
    assert bucket.folders(CHECKPOINTS) == ["20/1", "30/2"]


def test_a_chain_without_one_whole_checkpoint_is_left_for_a_person_to_mend():
    bucket = Bucket()
    for step in (10, 20):
        bucket.store.delete([bucket.checkpoint(step).replace("manifest.json", "data.safetensors")])
    bucket.store.clock += 2 * GRACE
    assert sweep(bucket).num_objects == 0


def test_a_chain_that_cannot_be_read_stops_the_sweep_of_checkpoints():
    bucket = Bucket()
    paths = [bucket.checkpoint(step) for step in (10, 20, 30, 40)]
    bucket.store.objects[paths[2]].data = b"{"
    bucket.store.clock += 2 * GRACE
    assert sweep(bucket).num_objects == 0


def test_a_shard_goes_only_when_every_kept_checkpoint_lists_it_and_no_buffer_holds_it():
    bucket = Bucket()
    (one, one_path), (held, held_path), (live, live_path) = (bucket.shard(seq) for seq in range(3))
    (late, late_path), (_, new_path) = (bucket.shard(seq) for seq in (3, 4))
    bucket.checkpoint(10, ingest=IngestState(intervals={one.incarnation: [(0, 3)]}))
    second = bucket.checkpoint(20, ingest=IngestState(intervals={one.incarnation: [(0, 4)]}))
    buffers = {second: [held], "": [live]}
    rules = Retention(1 + 1, None, 0, 1, GRACE, delete_shards=True)
    bucket.store.clock += GRACE
    young = bucket.shard(5)[1]

    def sweep_shards():
        return sweep(bucket, rules, held_by=lambda key: buffers.get(key, []))

    assert sweep_shards().num_objects == 1
    assert one_path not in bucket.store.objects
    assert {held_path, live_path, late_path, new_path, young} <= set(bucket.store.objects)
    bucket.checkpoint(30, ingest=IngestState(intervals={one.incarnation: [(0, 4)]}))
    buffers.clear()
    assert sweep_shards().num_objects == 3, "the checkpoint that did not list it is no longer kept"
    assert late not in [held, live] and {new_path, young} <= set(bucket.store.objects)


def test_the_live_buffer_is_looked_at_before_latest_is_read(monkeypatch):
    bucket, seen = Bucket(), []
    bucket.snapshot(0)
    bucket.checkpoint(0)
    check = bucket.committer.check
    monkeypatch.setattr(bucket.committer, "check", lambda: (seen.append("latest"), check())[1])
    sweep(bucket, replace(KEEP, delete_shards=True), held_by=lambda key: seen.append(key) or [])
    assert seen[:2] == ["", "latest"]


def test_shards_are_kept_unless_asked_otherwise_or_nobody_knows_what_buffers_hold():
    bucket = Bucket()
    shard, path = bucket.shard(0)
    bucket.checkpoint(10, ingest=IngestState(intervals={shard.incarnation: [(0, 1)]}))
    bucket.store.clock += 2 * GRACE
    sweep(bucket, Retention(1, None, 0, 1, GRACE, delete_shards=True))
    sweep(bucket, KEEP, held_by=lambda key: [])
    assert path in bucket.store.objects


def test_a_trainer_fenced_in_the_middle_stops_before_the_next_batch(monkeypatch):
    monkeypatch.setattr(sweeping, "BATCH_KEYS", 3)
    bucket = Bucket()
    for version in range(9):
        bucket.snapshot(version)
    bucket.store.clock += 2 * GRACE
    real_delete, deleted = bucket.store.delete, []

    def delete(keys):
        deleted.extend(keys)
        real_delete(keys)
        bucket.take_over()

    bucket.store.delete = delete
    with pytest.raises(Fenced):
        sweep(bucket)
    assert len(deleted) == 3


def test_an_evaluation_asked_for_after_the_mark_is_not_deleted():
    bucket = Bucket()
    keys = [bucket.snapshot(version) for version in range(5)]
    bucket.store.clock += 2 * GRACE
    real_now = bucket.store.now

    def now():
        latest = bucket.latest.model_copy(update={"commit": 99, "nonce": "e" * 32, "evaluation": keys[1]})
        bucket.store.cas("latest", latest.to_json(), bucket.store.get("latest").etag)
        bucket.store.now = real_now
        return real_now()

    bucket.store.now = now
    sweep(bucket)
    assert keys[1] in bucket.store.objects and keys[2] not in bucket.store.objects


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["publish", "delta", "checkpoint", "debris", "take over", "sweep", "wait"]),
            st.integers(1, 4),
        ),
        max_size=40,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_sweeping_at_any_time_never_breaks_what_latest_names_or_the_way_back(moves, keep_last, retain):
    rules = Retention(keep_last, 4, 1, retain, GRACE)
    bucket = Bucket()
    bucket.snapshot(0)
    bucket.checkpoint(0)
    step, saved = 0, [0]
    for move, amount in moves:
        bucket.store.clock += 1.0
        before = set(bucket.store.objects)
        if move in ("publish", "delta"):
            step += amount
            bucket.snapshot(step, base=bucket.latest.manifest if move == "delta" else None)
        elif move == "checkpoint":
            step += amount
            bucket.checkpoint(step, score=step % 3 / 3)
            saved.append(step)
        elif move == "debris":
            bucket.snapshot(step + 1, complete=amount > 2, commit=False)
            bucket.checkpoint(step + 1, complete=amount > 2, commit=False)
        elif move == "take over":
            bucket.take_over()
            step = bucket.restorable()[0]
            bucket.snapshot(step)
        elif move == "wait":
            bucket.store.clock += amount * GRACE / 2
        else:
            young = {k for k, o in bucket.store.objects.items() if bucket.store.clock - o.last_modified < GRACE}
            sweep(bucket, rules)
            assert young <= set(bucket.store.objects), "nothing young is deleted"
            assert sweep(bucket, rules).num_objects == 0, "one sweep takes all there is to take"
        assert not bucket.missing()
        assert not bucket.baseless(), "a delta lost what it builds on"
        assert any(k.startswith("weights/0000000000/000001-") for k in bucket.store.objects)
        steps = bucket.restorable()
        assert len(steps) >= min(keep_last, len(set(saved))) and steps[0] == saved[-1]
        assert move == "sweep" or before <= set(bucket.store.objects)


def test_retention_comes_from_the_live_settings():
    storage = Storage(
        uri="file:///x",
        trajectory_retention="UntilCheckpointed",
        grace_seconds=5,
        checkpoints=Checkpoints(keep_last=3, keep_every=100, keep_best=2),
    )
    assert Retention.of(Sync(retain_versions=4), storage) == Retention(3, 100, 2, 4, 5.0, delete_shards=True)


def test_a_retention_that_keeps_nothing_and_an_unknown_buffer_are_refused():
    with pytest.raises(ValueError, match="must be >= 1"):
        Retention(0, None, 0, 1, GRACE)
    with pytest.raises(ValueError, match="must be >= 1"):
        Retention(1, None, 0, 1, -1.0)
    assert Retention(1, None, 0, 1, 0.0).grace_seconds == 0.0, "the job's schema allows it"


def test_an_onlooker_sweeps_what_the_trainer_would_and_says_so_before():
    bucket = Bucket()
    for step in range(6):
        bucket.snapshot(step)
        bucket.checkpoint(step)
    bucket.store.clock += 10 * KEEP.grace_seconds
    ours, theirs = Sweeper(bucket.store, Onlooker(bucket.store)), Sweeper(bucket.store, bucket.committer)
    marked = ours.marked(KEEP)
    assert marked == theirs.marked(KEEP) and len(marked) > 0
    swept = ours.sweep(KEEP)
    assert (swept.num_objects, swept.total_bytes) == (len(marked), sum(marked.values()))
    assert not set(marked) & set(bucket.store.objects) and bucket.missing() == []


def test_an_onlooker_stops_when_a_trainer_takes_over():
    bucket = Bucket()
    bucket.snapshot(0)
    onlooker = Onlooker(bucket.store)
    bucket.take_over()
    with pytest.raises(Fenced, match="nothing more is deleted"):
        onlooker.check()


def test_there_is_nothing_to_sweep_where_no_run_is():
    with pytest.raises(UserError, match="no run at"):
        Onlooker(MemoryStore())
