"""Snapshots that hold an adapter alone: a reader gets the merged weights, or an error that says what is wrong."""

import json
import os

import pytest
import torch
from support.memory_store import MemoryStore
from support.weights_chain import ASSETS, Chain, moving_weights

from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey, new_nonce
from tba.lora import merged
from tba.snapshots import SnapshotFetcher, fetch_assets, fetch_manifest, fetch_snapshot
from tba.snapshots.hostcache import HostCache
from tba.snapshots.manifest import Link
from tba.snapshots.publish import publish_adapter

NAMES = ("layer.0", "layer.1")


def adapter(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    tensors = {f"{n}.lora_A.weight": torch.randn(2, 30, generator=generator) for n in NAMES}
    return tensors | {f"{n}.lora_B.weight": torch.randn(40, 2, generator=generator) for n in NAMES}


class Rig:
    """Version 0 in epoch 1, adapters 1 and 2 in epoch 2. Matrices are called as a module's."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr("support.weights_chain.moving_weights", lambda version: base())
        self.store = MemoryStore()
        self.keys = [Chain(self.store).full(0)]
        for version in (1, 2):
            self.keys.append(self.put(version))

    def put(self, version: int) -> str:
        key = WeightsKey(version, 2, new_nonce())
        below = Link(self.keys[0], fetch_manifest(self.store, self.keys[0]))
        publish_adapter(self.store, key, adapter(version), scale=0.5, base=below, parent=self.keys[-1], evaluation=None)
        return key.path

    def reads(self, fetcher, version: int) -> set[int]:
        self.store.calls.clear()
        fetcher(self.store, self.keys[version])
        return {WeightsKey.parse(key).version for call, key in self.store.calls if call == "get"}

    def edit(self, version: int, **changes) -> None:
        stored = self.store.objects[self.keys[version]]
        stored.data = json.dumps({**json.loads(stored.data), **changes}).encode()


def base() -> dict[str, torch.Tensor]:
    return {f"{n}.weight" if t.dim() == 2 else n: t for n, t in moving_weights(0).items()}


@pytest.fixture
def rig(monkeypatch) -> Rig:
    return Rig(monkeypatch)


def test_a_reader_gets_the_base_with_the_adapter_merged_in(rig):
    wanted = merged(base(), adapter(2), scale=0.5)
    for snapshot in (fetch_snapshot(rig.store, rig.keys[2]), SnapshotFetcher()(rig.store, rig.keys[2])):
        assert snapshot.key == rig.keys[2] and snapshot.manifest.policy == (2, 2)
        assert all(torch.equal(snapshot.tensors[n], t) for n, t in wanted.items())
        assert snapshot.tensors.keys() == wanted.keys()
        assert snapshot.assets == fetch_assets(rig.store, rig.keys[2]) == ASSETS


def test_a_reader_that_does_not_merge_gets_the_adapter_beside_one_base(rig):
    fetcher = SnapshotFetcher(merge=lambda: False)
    late, again = fetcher(rig.store, rig.keys[2]), fetcher(rig.store, rig.keys[1])
    for snapshot, version in ((late, 2), (again, 1)):
        assert snapshot.adapter is not None and snapshot.key == rig.keys[version]
        assert (snapshot.manifest.base, snapshot.manifest.scale) == (rig.keys[0], 0.5)
        assert all(torch.equal(snapshot.adapter[n], t) for n, t in adapter(version).items())
        assert all(torch.equal(snapshot.tensors[n], t) for n, t in base().items())
        wanted = merged(base(), adapter(version), scale=0.5)
        assert all(torch.equal(snapshot.merged().tensors[n], t) for n, t in wanted.items())
    assert all(late.tensors[n] is again.tensors[n] for n in late.tensors), "the base is in memory once"
    version0 = fetcher(rig.store, rig.keys[0])
    assert version0.adapter is None and version0.merged() is version0


def test_whether_to_merge_may_change_from_one_snapshot_to_the_next(rig):
    merges = [False]
    fetcher = SnapshotFetcher(merge=lambda: merges[0])
    beside = fetcher(rig.store, rig.keys[1])
    merges[0] = True
    assert beside.adapter is not None and fetcher(rig.store, rig.keys[2]).adapter is None


@pytest.mark.parametrize("merge", [True, False])
def test_changed_bytes_of_an_adapter_are_noticed_merged_or_not(rig, merge):
    key = f"{WeightsKey.parse(rig.keys[1]).prefix}adapter-00000.safetensors"
    data = rig.store.objects[key].data
    rig.store.objects[key].data = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptObject, match="the bytes were changed"):
        SnapshotFetcher(merge=lambda: merge)(rig.store, rig.keys[1])


@pytest.mark.parametrize("remember", [True, False])
def test_the_base_is_read_once(rig, remember):
    fetcher = SnapshotFetcher(remember=lambda: remember)
    assert rig.reads(fetcher, 1) == {0, 1}
    assert rig.reads(fetcher, 2) == {2}
    assert rig.reads(fetcher, 1) == {1}, "an older one, for its evaluation"


def test_snapshots_that_were_handed_out_never_change(rig):
    fetcher = SnapshotFetcher()
    found = [fetcher(rig.store, key) for key in rig.keys]
    for snapshot, version in zip(found, range(3), strict=True):
        wanted = merged(base(), adapter(version), scale=0.5) if version else base()
        assert all(torch.equal(snapshot.tensors[n], t) for n, t in wanted.items())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scale": None}, "scale None"),
        ({"depth": 2}, "depth 2"),
        ({"baseHash": "0" * 32}, "made from weights 0000"),
        ({"base": WeightsKey(0, 1, "9" * 32).path}, "which is missing"),
        ({"base": "latest"}, "its base is 'latest'"),
        ({"encoding": "full"}, "a full snapshot with base"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_its_base_is_refused(rig, changes, told):
    rig.edit(2, **changes)
    with pytest.raises(CorruptObject, match=told):
        fetch_snapshot(rig.store, rig.keys[2])


def test_changed_bytes_of_an_adapter_are_noticed_and_the_next_one_is_read(rig):
    fetcher = SnapshotFetcher()
    key = f"{WeightsKey.parse(rig.keys[1]).prefix}adapter-00000.safetensors"
    data = rig.store.objects[key].data
    rig.store.objects[key].data = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptObject, match="the bytes were changed"):
        fetcher(rig.store, rig.keys[1])
    assert fetcher(rig.store, rig.keys[2]).manifest.version == 2


def test_a_base_that_changed_in_memory_is_read_again(rig):
    fetcher = SnapshotFetcher()
    fetcher(rig.store, rig.keys[0]).tensors["layer.2.weight"].zero_()
    assert rig.reads(fetcher, 1) == {0, 1}
    assert torch.equal(fetcher(rig.store, rig.keys[2]).tensors["layer.2.weight"], base()["layer.2.weight"])


def test_the_base_stays_in_the_hosts_cache_however_many_adapters_follow(rig, tmp_path, monkeypatch):
    """A searcher that joins late reads it from there; adapters make room for each other."""
    monkeypatch.setattr("tba.snapshots.fetcher._SMALL_BYTES", 0)
    reader = SnapshotFetcher(cache=HostCache(tmp_path))
    reader(rig.store, rig.keys[0])
    (of_base,) = tmp_path.glob("*.weights")
    for version in range(1, 40):
        if version > 2:
            rig.keys.append(rig.put(version))
        os.utime(of_base, (1e9, 1e9))  # years ago: the longest unused, and no run's any more
        reader(rig.store, rig.keys[version])
    kept = list(tmp_path.glob("*.weights"))
    assert of_base in kept and len(kept) < 40
