"""Publish and fetch: what was published comes back bit for bit, or an error says which byte is wrong."""

import json

import pytest
import torch
from support.memory_store import MemoryStore
from transformers import LlamaConfig, LlamaForCausalLM

from tba import failpoints
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey
from tba.contracts.records import EvalRequest, SnapshotManifest
from tba.snapshots import fetch_manifest, fetch_snapshot, publish_snapshot
from tba.snapshots.publish import split_files
from tba.store.protocol import AlreadyExists, NotFound

KEY = WeightsKey(12, 3, "c" * 32)
ASSETS = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32])
def weights(request):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    return {name: p.detach().to(request.param) for name, p in LlamaForCausalLM(config).named_parameters()}


def publish(store, tensors, **options) -> SnapshotManifest:
    given = {"assets": ASSETS, "parent": None, "evaluation": None} | options
    return publish_snapshot(store, KEY, tensors, **given)


@pytest.mark.parametrize("max_file_bytes", [2**30, 3000])
def test_published_weights_come_back_bit_for_bit(weights, max_file_bytes):
    store = MemoryStore()
    request = EvalRequest(prompts="prompts/x", num_prompts=5, block_prompts=2, sampling="greedy", samples=1)
    manifest = publish(store, weights, parent="p", evaluation=request, max_file_bytes=max_file_bytes)
    snapshot = fetch_snapshot(store, KEY.path)
    assert snapshot.manifest == manifest == fetch_manifest(store, KEY.path)
    assert (manifest.policy, manifest.parent, manifest.evaluation) == ((3, 12), "p", request)
    assert snapshot.assets == ASSETS
    assert snapshot.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert snapshot.tensors[name].dtype == tensor.dtype
        assert torch.equal(snapshot.tensors[name], tensor)
    assert (len(manifest.files) > 3) == (max_file_bytes == 3000)


@pytest.mark.parametrize(("smallest", "files"), [(2**26, 1), (200, 8)])
def test_a_snapshot_is_several_files_once_each_is_worth_it(monkeypatch, smallest, files):
    monkeypatch.setattr("tba.snapshots.publish._MIN_FILE_BYTES", smallest)
    equal = {f"layer{i}": torch.full((100,), float(i)) for i in range(16)}
    store = MemoryStore()
    assert len(publish(store, equal).files) == files
    assert len(publish(MemoryStore(), equal, max_file_bytes=400).files) == 16
    assert fetch_snapshot(store, KEY.path).tensors["layer7"][0] == 7


def test_all_tensors_share_one_buffer(weights):
    store = MemoryStore()
    publish(store, weights, max_file_bytes=3000)
    tensors = fetch_snapshot(store, KEY.path).tensors.values()
    first = min(t.data_ptr() for t in tensors)
    last = max(t.data_ptr() + t.nbytes for t in tensors)
    assert last - first < sum(t.nbytes for t in tensors) + 16384  # headers and alignment between files


def test_the_manifest_is_written_last_and_nothing_twice(weights):
    store = MemoryStore()
    publish(store, weights)
    puts = [key for call, key in store.calls if call == "put_once"]
    assert puts[-1] == KEY.path and len(set(puts)) == len(puts) == 4
    publish(store, weights)  # the same bytes: a lost reply
    with pytest.raises(AlreadyExists):
        publish(store, {name: t + 1 for name, t in weights.items()})


@pytest.mark.parametrize("point", ["snapshot.after_data", "snapshot.before_manifest"])
def test_a_publisher_that_dies_before_the_manifest_leaves_nothing_readable(weights, point):
    store = MemoryStore()
    failpoints.configure(f"{point}=raise")
    try:
        with pytest.raises(failpoints.Failpoint):
            publish(store, weights)
    finally:
        failpoints.configure("")
    assert len(store.objects) == 3
    with pytest.raises(NotFound):
        fetch_snapshot(store, KEY.path)


def test_every_torn_or_changed_object_is_noticed(weights):
    store = MemoryStore()
    publish(store, weights, max_file_bytes=3000)
    for key in [k for k in store.objects if k != KEY.path]:
        good = store.objects[key].data
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad in (good[:-1], good + b"\0", b"", bytes(flipped)):
            store.objects[key].data = bad
            with pytest.raises(CorruptObject, match=key.rsplit("/", 1)[1]):
                fetch_snapshot(store, KEY.path)
        whole = store.objects.pop(key)
        with pytest.raises(NotFound):
            fetch_snapshot(store, KEY.path)
        whole.data = good
        store.objects[key] = whole
    assert fetch_snapshot(store, KEY.path).tensors.keys() == weights.keys()


def _drop_tensor(m):
    m["tensors"].pop()


def _wrong_shape(m):
    m["tensors"][0]["shape"] = [1, *m["tensors"][0]["shape"]]


def _wrong_dtype(m):
    m["tensors"][0]["dtype"] = "F16"


def _wrong_hash(m):
    m["tensors"][0]["hash"] = "0" * 32


def _other_file(m):
    m["tensors"][0]["file"] = "model-00009.safetensors"


def _twice(m):
    m["tensors"].append(m["tensors"][0])


def _escape(m):
    m["files"][0]["name"] = "../../../latest"
    for tensor in m["tensors"]:
        tensor["file"] = "../../../latest"


def _huge(m):
    m["files"][0]["size"] = 2**62


def _other_version(m):
    m["version"] = 13


def _unknown_field(m):
    m["pickle"] = "x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_tensor, "other tensors"),
        (_wrong_shape, "manifest says"),
        (_wrong_dtype, "manifest says"),
        (_wrong_hash, "has hash"),
        (_other_file, "does not list"),
        (_twice, "twice"),
        (_escape, "not a data object"),
        (_huge, "not a data object"),
        (_other_version, "holds the manifest of"),
        (_unknown_field, "cannot be parsed: [^:]*: unknown field, got"),
    ],
)
def test_a_manifest_that_disagrees_with_the_data_is_refused(weights, change, message):
    store = MemoryStore()
    publish(store, weights)
    manifest = json.loads(store.objects[KEY.path].data)
    change(manifest)
    store.objects[KEY.path].data = json.dumps(manifest).encode()
    with pytest.raises(CorruptObject, match=message):
        fetch_snapshot(store, KEY.path)


def test_a_torn_manifest_is_refused(weights):
    store = MemoryStore()
    publish(store, weights)
    store.objects[KEY.path].data = store.objects[KEY.path].data[:-10]
    with pytest.raises(CorruptObject, match=f"{KEY.path} cannot be parsed: is no valid JSON"):
        fetch_snapshot(store, KEY.path)


def test_a_key_that_is_no_manifest_is_a_bug():
    with pytest.raises(ValueError, match="manifest key"):
        fetch_manifest(MemoryStore(), KEY.prefix + "model-00000.safetensors")


@pytest.mark.parametrize("name", ["../x", "/x", "", "a//b", ".hidden", "a b"])
def test_an_asset_cannot_leave_its_folder(weights, name):
    with pytest.raises(ValueError, match="file name must be"):
        publish(MemoryStore(), weights, assets={name: b""})


def test_files_hold_whole_tensors_and_at_most_the_limit():
    tensors = {f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate([4, 4, 4, 20, 1, 9])}
    assert split_files(tensors, 10) == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
