"""Checkpoints: what was captured comes back bit for bit, and a damaged one gives way to its parent, never to step 0."""

import json
import weakref

import pytest
import torch
from support.learning import feed, live_config, make_learner, make_shard, run_config
from support.memory_store import MemoryStore

from tba import failpoints
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import CheckpointKey
from tba.contracts.records import CheckpointManifest, IngestEntry, Lineage, ShardId
from tba.protocol.bookkeeping import Bookkeeping
from tba.store.protocol import AccessDenied, NotFound
from tba.trainer import checkpoint
from tba.trainer.checkpoint import (
    LoopFacts,
    TrainerState,
    held_shards,
    read_checkpoint,
    read_manifest,
    restore_newest,
    write_checkpoint,
)
from tba.trainer.learner import new_rows

NONCES = [f"{i:032x}" for i in range(1, 9)]


@pytest.fixture(params=["memory", "local"])
def any_store(request):
    return MemoryStore() if request.param == "memory" else request.getfixturevalue("local_store")


def manifest(step: int, parent: str | None = None) -> CheckpointManifest:
    book = Bookkeeping(epoch=2, step=step, lineage=Lineage(resume_steps={1: 0, 2: 0}), checkpoint=parent)
    return book.ingest(ShardId("a" * 32, 4)).manifest(NONCES[step], [])


def state(value: float = 1.0) -> TrainerState:
    return TrainerState({"master": {"w": torch.full((3,), value)}}, {"value": value, "shard_paths": {}})


def chain(store, steps: int) -> list[str]:
    """Keys of `steps` checkpoints, each the parent of the next."""
    keys: list[str] = []
    for step in range(steps):
        keys.append(write_checkpoint(store, manifest(step, keys[-1] if keys else None), state(float(step))))
    return keys


def damage(store: MemoryStore, key: str) -> None:
    data = bytearray(store.objects[key].data)
    data[-1] ^= 1
    store.objects[key].data = bytes(data)


def test_learner_restored_through_storage_goes_on_bit_for_bit(any_store):
    config = run_config(reference={"type": "EMA", "decay": 0.9}, parameters={"ratioAlpha": 0.5})
    learner = make_learner(config)
    shards = {s.header.id: s for s in (make_shard(0), make_shard(1))}
    feed(learner, *shards.values())
    for _ in range(3):
        learner.train_step(live_config(), epoch=1)
    key = write_checkpoint(any_store, manifest(learner.step), learner.state())

    found, again, saved = restore_newest(any_store, key)
    assert (found, again.step, again.parent, again.ingest) == (key, 3, None, manifest(3).ingest)
    twin = make_learner(config, seed=99)
    twin.restore(saved, again.step, lambda ids: [new_rows(shards[i], Lineage()) for i in ids])
    for _ in range(3):
        mine, theirs = learner.train_step(live_config(), epoch=1), twin.train_step(live_config(), epoch=1)
        assert (mine.loss, mine.update) == (theirs.loss, theirs.update)
    theirs = dict(twin.policy.model.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in learner.policy.model.named_parameters())
    assert twin.shard_paths == learner.shard_paths
    assert set(held_shards(any_store, key)) == set(shards)


def test_captured_state_does_not_follow_the_live_learner():
    learner = make_learner()
    feed(learner, make_shard(0))
    learner.train_step(live_config(), epoch=1)
    captured = learner.state()
    copies = {f: {n: t.clone() for n, t in tensors.items()} for f, tensors in captured.tensors.items()}
    facts = json.dumps(captured.facts)
    feed(learner, make_shard(1))
    learner.train_step(live_config(), epoch=1)
    assert json.dumps(captured.facts) == facts
    for file, tensors in copies.items():
        for name, tensor in tensors.items():
            assert torch.equal(captured.tensors[file][name].nan_to_num(), tensor.nan_to_num()), f"{file} {name}"


def test_manifest_is_written_last():
    store = MemoryStore()
    key = write_checkpoint(store, manifest(0), state())
    written = [name for call, name in store.calls if call == "put_once"]
    assert written[-1] == key
    assert len(written) == 3 and {f.name for f in read_manifest(store, key).files} == {
        "master.safetensors",
        "facts.json",
    }


def test_files_are_made_one_at_a_time_and_are_gone_when_the_next_is_made(monkeypatch):
    alive: list[weakref.ref] = []

    class Tracked(bytearray):
        """A bytearray that a weak reference may look at."""

    def serialise(tensors):
        assert [r() for r in alive if r() is not None] == [], "the file before is still in memory"
        data = Tracked(original(tensors))
        alive.append(weakref.ref(data))
        return data

    original = checkpoint.serialise
    monkeypatch.setattr(checkpoint, "serialise", serialise)
    many = TrainerState({name: {"w": torch.ones(3)} for name in ("a", "b", "c")}, {"shard_paths": {}})
    write_checkpoint(MemoryStore(), manifest(0), many)
    assert len(alive) == 3


def test_facts_of_the_loop_come_back_from_a_checkpoint():
    store = MemoryStore()
    carried, live = [IngestEntry(before_step=3, key="k", num_rows=2)], live_config()
    facts = LoopFacts("weights/x", carried, ["shards/readme", "shards/a"], live)
    saved = TrainerState({}, {"shard_paths": {}, **facts.to_json()})
    key = write_checkpoint(store, manifest(0), saved)
    again = LoopFacts.of(read_checkpoint(store, key)[1].facts, key)
    assert again == LoopFacts("weights/x", carried, ["shards/a", "shards/readme"], live)


@pytest.mark.parametrize(("fact", "value"), [("carried", ['{"later": 1}']), ("live", '{"later": 1}')])
def test_facts_of_another_release_are_told_by_checkpoint_and_field_in_one_line(fact, value):
    facts = LoopFacts("weights/x").to_json() | {fact: value}
    with pytest.raises(CorruptObject, match=rf"^{fact} of checkpoints/key cannot be parsed: .*; restore it [^\n]*$"):
        LoopFacts.of(facts, "checkpoints/key")


@pytest.mark.parametrize("point", ["checkpoint.before_data", "checkpoint.before_manifest"])
def test_write_that_broke_leaves_no_manifest_and_may_be_repeated(point):
    store = MemoryStore()
    key = CheckpointKey(0, 2, NONCES[0]).path
    failpoints.configure(f"{point}=raise")
    try:
        with pytest.raises(failpoints.Failpoint):
            write_checkpoint(store, manifest(0), state())
    finally:
        failpoints.configure("")
    with pytest.raises(NotFound):
        read_manifest(store, key)
    assert write_checkpoint(store, manifest(0), state()) == key
    assert read_checkpoint(store, key)[1].facts["value"] == 1.0


@pytest.mark.parametrize("file", ["master.safetensors", "facts.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_parent_is_taken_if_the_newest_is_damaged(file, harm):
    store = MemoryStore()
    keys = chain(store, 3)
    victim = CheckpointKey.parse(keys[2]).prefix + file
    if harm == "flip":
        damage(store, victim)
    elif harm == "truncate":
        store.objects[victim].data = store.objects[victim].data[:-1]
    else:
        del store.objects[victim]
    found, restored, saved = restore_newest(store, keys[2])
    assert (found, restored.step, saved.facts["value"]) == (keys[1], 1, 1.0)
    assert torch.equal(saved.tensors["master"]["w"], torch.full((3,), 1.0))


def test_a_checkpoint_that_is_gone_is_refused_in_words():
    store = MemoryStore()
    (key,) = chain(store, 1)
    victim = CheckpointKey.parse(key).prefix + "facts.json"
    del store.objects[victim]
    with pytest.raises(CorruptObject, match=f"{key}: {victim} is missing"):
        restore_newest(store, key)


def test_keys_that_storage_refuses_amid_a_restore_are_told_and_no_reason_to_take_the_parent(monkeypatch):
    store = MemoryStore()
    keys = chain(store, 2)
    get = store.get

    def refusing(key):
        if key == keys[1]:
            raise AccessDenied(f"{key}: 403")
        return get(key)

    monkeypatch.setattr(store, "get", refusing)
    with pytest.raises(AccessDenied):
        restore_newest(store, keys[1])


def test_parents_are_followed_as_far_as_needed_and_never_by_a_listing():
    store = MemoryStore()
    keys = chain(store, 4)
    for key in keys[1:]:
        damage(store, CheckpointKey.parse(key).prefix + "facts.json")
    store.calls.clear()
    assert restore_newest(store, keys[3])[0] == keys[0]
    assert store.count("list") == 0


def test_run_whose_checkpoints_are_all_damaged_is_refused_and_not_begun_again():
    store = MemoryStore()
    keys = chain(store, 3)
    for key in keys:
        damage(store, CheckpointKey.parse(key).prefix + "master.safetensors")
    with pytest.raises(CorruptObject, match="no checkpoint of this run can be read") as refused:
        restore_newest(store, keys[2])
    assert all(key in str(refused.value) for key in keys)


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b'{"epoch": 1}'])
def test_manifest_that_cannot_be_parsed_is_corrupt(data):
    store = MemoryStore()
    (key,) = chain(store, 1)
    store.objects[key].data = data
    with pytest.raises(CorruptObject, match="cannot be parsed"):
        read_manifest(store, key)
    with pytest.raises(CorruptObject, match="no checkpoint"):
        restore_newest(store, key)


@pytest.mark.parametrize("change", [{"step": 1}, {"epoch": 3}, {"nonce": "e" * 32}])
def test_manifest_that_is_not_the_one_its_key_names_is_refused(change):
    store = MemoryStore()
    keys = chain(store, 2)
    lying = read_manifest(store, keys[0]).model_copy(update=change)
    store.objects[keys[0]].data = lying.to_json()
    for read in (read_manifest, read_checkpoint, held_shards):
        with pytest.raises(CorruptObject, match="says step"):
            read(store, keys[0])


def test_checkpoint_without_facts_is_corrupt():
    store = MemoryStore()
    keys = chain(store, 2)
    found = read_manifest(store, keys[1])
    without = found.model_copy(update={"files": [f for f in found.files if f.name != "facts.json"]})
    store.objects[keys[1]].data = without.to_json()
    for read in (read_checkpoint, held_shards):
        with pytest.raises(CorruptObject, match=r"lists no facts\.json"):
            read(store, keys[1])
    assert restore_newest(store, keys[1])[0] == keys[0]
