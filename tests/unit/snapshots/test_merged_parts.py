"""Parts of a snapshot that several processes wrote are, together, what one process would have written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore
from support.weights_chain import moving_weights, same

from tba.contracts.keys import WeightsKey
from tba.contracts.records import FileEntry, SnapshotManifest, TensorEntry
from tba.snapshots import fetch_snapshot, publish_snapshot
from tba.snapshots.encode import Base, EncodedDelta, codec_threads, encode_delta, full_bytes
from tba.snapshots.manifest import weights_hash
from tba.snapshots.publish import (
    Part,
    finish_delta,
    finish_snapshot,
    merge_parts,
    part_stem,
    publish_delta,
    put_encoded,
    put_tensors,
)

ANCHOR, NEXT = WeightsKey(0, 1, "a" * 32), WeightsKey(1, 1, "b" * 32)
NAMES = sorted(moving_weights(0))
FACTS = {"parent": None, "evaluation": None}


def entry(name: str, file: str) -> TensorEntry:
    return TensorEntry(name=name, dtype="F32", shape=[1], file=file, hash="0")


def test_merged_parts_list_all_files_and_tensors_in_order():
    files = [FileEntry(name=name, size=1, hash="0") for name in "pq"]
    one, two = Part(files[:1], [entry("b", "p")]), Part(files[1:], [entry("a", "q")])
    assert merge_parts([one, Part([], []), two]) == Part(files, [entry("b", "p"), entry("a", "q")])
    assert merge_parts([one]) == one and one.files == files[:1], "parts stay what they were"


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (Part([FileEntry(name="p", size=2, hash="1")], []), "file"),
        (Part([FileEntry(name="q", size=2, hash="1")], [entry("w", "q")]), "tensor"),
    ],
)
def test_two_parts_that_hold_the_same_are_refused(other: Part, kind: str):
    with pytest.raises(ValueError, match=f"each {kind} must be of one part"):
        merge_parts([Part([FileEntry(name="p", size=1, hash="0")], [entry("w", "p")]), other])


class Processes:
    """Publish an anchor and a delta, each process the tensors that `owners` gives it; one process writes as ever."""

    def __init__(self, owners: dict[str, int], size: int, max_file_bytes: int) -> None:
        self.store = MemoryStore()
        self._limit = max_file_bytes
        self._shares = [
            [{n: t for n, t in moving_weights(version).items() if owners[n] == rank} for rank in range(size)]
            for version in (0, 1)
        ]

    def anchor(self) -> SnapshotManifest:
        parts = [
            put_tensors(self.store, ANCHOR, share, stem=part_stem("model", rank), max_file_bytes=self._limit)
            for rank, share in enumerate(self._shares[0])
        ]
        return finish_snapshot(self.store, ANCHOR, merge_parts(parts), assets={}, **FACTS)

    def encoded(self, anchor: SnapshotManifest) -> list[EncodedDelta]:
        found = [
            encode_delta(Base(ANCHOR.path, anchor, before), after, max_bytes=float("inf"))
            for before, after in zip(*self._shares, strict=True)
        ]
        return [delta for delta in found if delta is not None]

    def delta(self, encoded: list[EncodedDelta]) -> SnapshotManifest:
        parts = [
            put_encoded(self.store, NEXT, delta.part, stem=part_stem("delta", rank), max_file_bytes=self._limit)
            for rank, delta in enumerate(encoded)
        ]
        return finish_delta(self.store, NEXT, encoded[0], merge_parts(parts), **FACTS)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.tuples(
    st.just(n), st.fixed_dictionaries({name: st.integers(0, n - 1) for name in NAMES}), st.sampled_from([500, 2**30]),
)))  # fmt: skip
def test_parts_of_any_number_of_processes_are_the_tensors_and_hashes_of_one(world):
    size, owners, limit = world
    alone = MemoryStore()
    full = publish_snapshot(alone, ANCHOR, moving_weights(0), assets={}, **FACTS)
    base = Base(ANCHOR.path, full, moving_weights(0))
    whole = encode_delta(base, moving_weights(1), max_bytes=float("inf"))
    assert whole is not None
    delta = publish_delta(alone, NEXT, whole, **FACTS)

    many = Processes(owners, size, limit)
    anchor = many.anchor()
    encoded = many.encoded(anchor)
    assert sum(one.num_bytes for one in encoded) == whole.num_bytes, "the choice of a delta is that of one process"
    assert full_bytes(anchor.tensors) == full_bytes(full.tensors) == sum(t.nbytes for t in base.tensors.values())
    for made, wanted in ((anchor, full), (many.delta(encoded), delta)):
        assert weights_hash(made) == weights_hash(wanted)
        assert (made.base, made.base_hash, made.depth) == (wanted.base, wanted.base_hash, wanted.depth)
    assert same(fetch_snapshot(many.store, ANCHOR.path).tensors, 0)
    assert same(fetch_snapshot(many.store, NEXT.path).tensors, 1)


@pytest.mark.parametrize(
    ("cores", "processes", "each"), [(64, 1, 4), (64, 8, 2), (32, 8, 1), (8, 1, 2), (2, 1, 1), (2, 4, 1)]
)
def test_processes_of_a_host_encode_on_a_quarter_of_its_cores_together(monkeypatch, cores, processes, each):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert codec_threads(processes) == each
