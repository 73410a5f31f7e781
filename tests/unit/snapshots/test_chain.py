"""Chains of deltas: any reader gets the weights bit for bit, or an error that says what is wrong."""

import json

import pytest
import torch
from support.memory_store import MemoryStore
from support.weights_chain import ASSETS, Chain, moving_weights, same

from tba import failpoints
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey
from tba.snapshots import fetch_assets, fetch_manifest, fetch_snapshot
from tba.snapshots.encode import encode_delta
from tba.snapshots.manifest import Link, read_chain, weights_hash
from tba.store.protocol import NotFound


def data_of(store: MemoryStore, manifest_key: str) -> list[str]:
    prefix = WeightsKey.parse(manifest_key).prefix
    return [k for k in store.objects if k.startswith(prefix) and k != manifest_key and "assets" not in k]


@pytest.mark.parametrize("max_file_bytes", [2**30, 500])
def test_every_snapshot_of_a_chain_comes_back_bit_for_bit(max_file_bytes):
    store = MemoryStore()
    for version, key in enumerate(Chain(store, max_file_bytes=max_file_bytes).up_to(4)):
        snapshot = fetch_snapshot(store, key)
        assert same(snapshot.tensors, version) and snapshot.key == key
        assert snapshot.assets == fetch_assets(store, key) == ASSETS
        assert (snapshot.manifest.depth, snapshot.manifest.encoding) == (version, "delta" if version else "full")
        assert (len(snapshot.manifest.files) > 1) == (max_file_bytes == 500)


def test_a_delta_names_its_base_and_the_hashes_of_its_result():
    store = MemoryStore()
    chain = Chain(store)
    anchor, first = chain.up_to(1)
    full = chain.full(1)
    found, whole = fetch_manifest(store, first), fetch_manifest(store, full)
    assert (found.base, found.base_hash) == (anchor, weights_hash(fetch_manifest(store, anchor)))
    assert {t.name: t.hash for t in found.tensors} == {t.name: t.hash for t in whole.tensors}
    assert weights_hash(found) == weights_hash(whole) != found.base_hash
    assert found.total_bytes < whole.total_bytes and not found.assets


def test_a_reader_that_holds_a_snapshot_of_the_chain_needs_only_what_is_behind_it():
    store = MemoryStore()
    keys = Chain(store).up_to(5)
    held = Link(keys[3], fetch_manifest(store, keys[3]))
    assert [link.key for link in read_chain(store, keys[5], held=held)] == keys[4:]
    assert [link.key for link in read_chain(store, keys[5])] == keys
    assert [link.key for link in read_chain(store, keys[2], held=held)] == keys[:3], "held, but not below it"


def test_a_tensor_that_did_not_change_costs_no_bytes_and_unequal_shapes_make_no_delta():
    chain = Chain(MemoryStore())
    chain.full(0)
    weights = moving_weights(0)
    unchanged = encode_delta(chain.bases[0], weights, max_bytes=0)
    assert unchanged is not None and unchanged.num_bytes == 0
    for other in (
        weights | {"norm": weights["norm"].double()},
        weights | {"norm": weights["norm"][:-1]},
        weights | {"more": weights["norm"]},
        {n: t for n, t in weights.items() if n != "norm"},
    ):
        assert encode_delta(chain.bases[0], other, max_bytes=float("inf")) is None


def test_a_delta_above_the_limit_is_not_made():
    chain = Chain(MemoryStore())
    chain.full(0)
    made = encode_delta(chain.bases[0], moving_weights(1), max_bytes=float("inf"))
    assert made is not None
    assert encode_delta(chain.bases[0], moving_weights(1), max_bytes=made.num_bytes) is not None
    assert encode_delta(chain.bases[0], moving_weights(1), max_bytes=made.num_bytes - 1) is None


def test_weights_in_another_order_of_memory_are_encoded_in_row_order():
    store = MemoryStore()
    chain = Chain(store)
    chain.full(0)
    strided = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in moving_weights(1).items()}
    made = encode_delta(chain.bases[0], strided, max_bytes=float("inf"))
    plain = encode_delta(chain.bases[0], moving_weights(1), max_bytes=float("inf"))
    assert made is not None and plain is not None
    assert made.part.tensors == plain.part.tensors
    assert all(torch.equal(blob, plain.part.blobs[name]) for name, blob in made.part.blobs.items())


@pytest.mark.parametrize("point", ["snapshot.after_data", "snapshot.before_manifest"])
def test_a_publisher_that_dies_before_the_manifest_of_a_delta_leaves_nothing_readable(point):
    store = MemoryStore()
    chain = Chain(store)
    (anchor,) = chain.up_to(0)
    before = set(store.objects)
    failpoints.configure(f"{point}=raise")
    try:
        with pytest.raises(failpoints.Failpoint):
            chain.delta(1)
    finally:
        failpoints.configure("")
    (debris,) = set(store.objects) - before
    with pytest.raises(NotFound):
        fetch_snapshot(store, WeightsKey.parse(debris).path)
    assert same(fetch_snapshot(store, anchor).tensors, 0)


def test_every_torn_changed_or_missing_object_of_a_chain_is_noticed():
    store = MemoryStore()
    keys = Chain(store).up_to(3)
    for key in [k for manifest in keys for k in data_of(store, manifest)]:
        good = store.objects[key].data
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad in (good[:-1], good + b"\0", b"", bytes(flipped)):
            store.objects[key].data = bad
            with pytest.raises(CorruptObject, match=key.rsplit("/", 1)[1]):
                fetch_snapshot(store, keys[-1])
        store.objects[key].data = good
        gone = store.objects.pop(key)
        with pytest.raises(NotFound):
            fetch_snapshot(store, keys[-1])
        store.objects[key] = gone
    for key in keys[:-1]:
        gone = store.objects.pop(key)
        with pytest.raises(CorruptObject, match=rf"needs {key}, which is missing"):
            fetch_snapshot(store, keys[-1])
        store.objects[key] = gone
    assert same(fetch_snapshot(store, keys[-1]).tensors, 3)


def rewrite(store: MemoryStore, key: str, **changes) -> None:
    manifest = json.loads(store.objects[key].data)
    store.objects[key].data = json.dumps(manifest | changes).encode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": None}, "a delta snapshot with base None"),
        ({"baseHash": None}, "a delta snapshot with base"),
        ({"depth": 0}, "a delta snapshot with base"),
        ({"encoding": "full"}, "a full snapshot with base"),
        ({"depth": 2}, "depth 2 on"),
        ({"baseHash": "0" * 32}, "made from weights 0000"),
        ({"base": "weights/x"}, "not a weights key"),
        ({"base": "latest"}, "not a weights key"),
        ({"base": WeightsKey(0, 2, "a" * 32).path}, "not a manifest of epoch 1"),
        ({"base": WeightsKey(0, 1, "a" * 32).prefix + "x"}, "not a manifest of epoch 1"),
    ],
)
def test_a_manifest_whose_base_does_not_add_up_is_refused(changes, message):
    store = MemoryStore()
    _, first = Chain(store).up_to(1)
    rewrite(store, first, **changes)
    with pytest.raises(CorruptObject, match=message):
        fetch_snapshot(store, first)


def test_a_chain_that_bites_its_tail_ends():
    store = MemoryStore()
    _, first = Chain(store).up_to(1)
    rewrite(store, first, base=first)
    with pytest.raises(CorruptObject, match="depth 1 on"):
        fetch_snapshot(store, first)


def test_another_base_with_the_same_shapes_is_not_taken_for_the_right_one():
    store = MemoryStore()
    chain = Chain(store)
    _, first = chain.up_to(1)
    other = chain.full(2)
    rewrite(store, first, base=other)
    with pytest.raises(CorruptObject, match="made from weights"):
        fetch_snapshot(store, first)
    rewrite(store, first, base=other, baseHash=weights_hash(fetch_manifest(store, other)))
    with pytest.raises(CorruptObject, match="after its deltas"):
        fetch_snapshot(store, first)


def test_a_delta_of_other_tensors_than_its_base_has_is_refused():
    store = MemoryStore()
    _, first = Chain(store).up_to(1)
    manifest = fetch_manifest(store, first)
    tensors = [t.model_copy(update={"shape": [30, 40]}) if t.name == "layer.0" else t for t in manifest.tensors]
    store.objects[first].data = manifest.model_copy(update={"tensors": tensors}).to_json()
    with pytest.raises(CorruptObject, match="other tensors than"):
        fetch_snapshot(store, first)


def test_a_file_that_holds_other_deltas_than_the_manifest_says_is_refused():
    store = MemoryStore()
    chain = Chain(store, max_file_bytes=300)
    _, first = chain.up_to(1)
    manifest = fetch_manifest(store, first)
    files = [f.name for f in manifest.files]
    moved = [t.model_copy(update={"file": files[0]}) for t in manifest.tensors]
    store.objects[first].data = manifest.model_copy(update={"tensors": moved}).to_json()
    with pytest.raises(CorruptObject, match="other deltas than"):
        fetch_snapshot(store, first)
