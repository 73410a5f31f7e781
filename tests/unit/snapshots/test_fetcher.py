"""The searcher's fetcher: a delta on what is held costs the delta alone, and nothing handed out ever changes."""

import pytest
import torch
from support.memory_store import MemoryStore
from support.weights_chain import ASSETS, Chain, moving_weights, same

from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey
from tba.snapshots import SnapshotFetcher
from tba.store.protocol import NotFound


class Rig:
    def __init__(self, versions: int, **options) -> None:
        self.store = MemoryStore()
        self.chain = Chain(self.store)
        self.keys = self.chain.up_to(versions)
        self.fetcher = SnapshotFetcher(**options)

    def fetch(self, version: int):
        return self.fetcher(self.store, self.keys[version])

    def reads(self, version: int) -> set[int]:
        """Versions whose objects a fetch reads."""
        self.store.calls.clear()
        self.fetch(version)
        return {WeightsKey.parse(key).version for call, key in self.store.calls if call == "get"}

    def break_data(self, version: int, change=lambda data: data[:-1] + bytes([data[-1] ^ 1])) -> None:
        prefix = WeightsKey.parse(self.keys[version]).prefix
        for key, stored in self.store.objects.items():
            if key.startswith(prefix) and key.endswith(".safetensors"):
                stored.data = change(stored.data)


def test_a_delta_on_the_held_snapshot_reads_that_delta_alone():
    rig = Rig(4)
    assert rig.reads(1) == {0, 1}
    assert rig.reads(2) == {2}
    assert rig.reads(4) == {3, 4}
    assert rig.reads(4) == set()
    snapshot = rig.fetch(4)
    assert same(snapshot.tensors, 4) and snapshot.assets == ASSETS


def test_a_late_joiner_reads_the_anchor_and_the_deltas_on_it_and_nothing_older():
    rig = Rig(2)
    rig.keys += [rig.chain.full(3), rig.chain.delta(4), rig.chain.delta(5)]
    assert rig.reads(5) == {3, 4, 5}
    assert same(rig.fetch(5).tensors, 5)


def test_snapshots_that_were_handed_out_never_change():
    rig = Rig(4)
    found = [rig.fetch(version) for version in (0, 1, 3, 4)]
    for snapshot, version in zip(found, (0, 1, 3, 4), strict=True):
        assert same(snapshot.tensors, version)
    spans = [{t.data_ptr() for t in s.tensors.values() if t.numel()} for s in found]
    assert all(not a & b for i, a in enumerate(spans) for b in spans[i + 1 :])


def test_an_older_snapshot_for_an_evaluation_does_not_displace_the_newest_as_base():
    rig = Rig(5)
    rig.fetch(4)
    assert rig.reads(2) == {0, 1, 2}
    assert same(rig.fetch(2).tensors, 2)
    assert rig.reads(5) == {5}


def test_after_a_take_over_the_lower_version_of_the_later_epoch_is_the_base():
    rig = Rig(4)
    rig.fetch(4)
    restored = Chain(rig.store, epoch=2)
    rig.keys = [restored.full(2), restored.delta(3)]
    assert rig.reads(0) == {2}
    assert rig.reads(1) == {3}
    assert same(rig.fetch(1).tensors, 3)


def test_without_deltas_to_come_no_memory_is_kept():
    rig = Rig(2, remember=lambda: False)
    rig.fetch(0)
    assert rig.reads(1) == {0, 1}


@pytest.mark.parametrize("error", [CorruptObject, NotFound])
def test_a_bad_delta_leaves_what_is_held_and_the_next_anchor_heals(error):
    rig = Rig(3)
    rig.fetch(1)
    if error is NotFound:
        prefix = WeightsKey.parse(rig.keys[2]).prefix
        rig.store.delete([k for k in rig.store.objects if k.startswith(prefix) and k.endswith(".safetensors")])
    else:
        rig.break_data(2)
    for version in (2, 3):
        with pytest.raises(error):
            rig.fetch(version)
    rig.keys += [rig.chain.full(4), rig.chain.delta(5)]
    assert rig.reads(4) == {4} and rig.reads(5) == {5}
    assert same(rig.fetch(5).tensors, 5)


def test_a_delta_damaged_on_the_way_is_read_again_on_what_is_still_held():
    rig = Rig(2)
    rig.fetch(1)
    good = {k: o.data for k, o in rig.store.objects.items()}
    rig.break_data(2)
    with pytest.raises(CorruptObject):
        rig.fetch(2)
    for key, data in good.items():
        rig.store.objects[key].data = data
    assert rig.reads(2) == {2} and same(rig.fetch(2).tensors, 2)


def test_held_weights_that_changed_in_memory_are_given_up_for_the_anchor():
    rig = Rig(2)
    held = rig.fetch(1)
    held.tensors["layer.3"].view(torch.int16)[3, 3] ^= 1  # a flipped bit
    assert rig.reads(2) == {0, 1, 2}
    assert same(rig.fetch(2).tensors, 2)


def test_a_missing_base_is_an_error_until_the_next_anchor():
    rig = Rig(2)
    rig.store.delete([rig.keys[1]])
    with pytest.raises(CorruptObject, match="missing"):
        rig.fetch(2)
    rig.keys.append(rig.chain.full(3))
    assert same(rig.fetch(3).tensors, 3)


def test_who_holds_nothing_takes_the_newest_readable_snapshot_of_the_chain():
    rig = Rig(4)
    rig.break_data(3)
    found = rig.fetch(4)
    assert found.key == rig.keys[2] and found.manifest.version == 2 and same(found.tensors, 2)
    with pytest.raises(CorruptObject):
        rig.fetch(4)
    rig.keys.append(rig.chain.full(5))
    assert same(rig.fetch(5).tensors, 5)


def test_who_has_been_given_weights_is_never_given_older_ones_unasked():
    rig = Rig(4, remember=lambda: False)
    rig.fetch(2)
    rig.break_data(3)
    with pytest.raises(CorruptObject):
        rig.fetch(4)


def test_a_broken_anchor_gives_nothing():
    rig = Rig(2)
    rig.break_data(0)
    with pytest.raises(CorruptObject):
        rig.fetch(2)


def test_weights_move_at_all():
    assert not same(moving_weights(1), 0)
