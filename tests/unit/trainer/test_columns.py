import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.trainer.columns import CHUNK_TOKENS, Columns, TokenArena, sequence_hashes


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype="i8")


def test_freed_ids_are_handed_out_again_and_living_rows_keep_their_values() -> None:
    columns = Columns(value="i4")
    ids = columns.allocate(3)
    columns["value"][ids] = [7, 8, 9]
    columns.free(ids[[1]])
    assert len(columns) == 2
    more = columns.allocate(2)
    assert more.tolist() == [1, 3]
    columns["value"][more] = [10, 11]
    assert columns["value"].tolist() == [7, 10, 9, 11]


@given(st.lists(st.lists(st.integers(0, 40_000), min_size=1, max_size=9), max_size=12), st.randoms())
@settings(max_examples=25, deadline=None)
def test_living_sequences_survive_appends_frees_and_compaction(batches: list[list[int]], random: object) -> None:
    arena, living, rng = TokenArena(), {}, np.random.default_rng(0)
    for batch, lengths in enumerate(batches):
        offsets = offsets_of(lengths)
        tokens = rng.integers(0, 1000, offsets[-1], dtype=np.int32)
        for i, start in enumerate(arena.append(tokens, offsets).tolist()):
            living[batch, i] = [start, tokens[offsets[i] : offsets[i + 1]]]
        dead = [key for key in living if random.random() < 0.6]
        arena.free(np.array([living[k][0] for k in dead], "i8"), np.array([len(living[k][1]) for k in dead], "i8"))
        for key in dead:
            del living[key]
        if arena.fragmented and living:
            starts = arena.move(
                np.array([s for s, _ in living.values()]), np.array([len(t) for _, t in living.values()])
            )
            for entry, start in zip(living.values(), starts.tolist(), strict=True):
                entry[0] = start
            assert not arena.fragmented
        for start, expected in living.values():
            assert np.array_equal(arena.view(start, len(expected)), expected)


def test_memory_of_an_arena_whose_sequences_come_and_go_stays_bounded() -> None:
    arena = TokenArena()
    offsets = offsets_of([100] * 1000)
    kept: list[np.ndarray] = []
    for _ in range(200):
        kept.append(arena.append(np.zeros(100_000, "i4"), offsets))
        if len(kept) > 3:
            arena.free(kept.pop(0), np.full(1000, 100))
    assert arena.nbytes < 6 * 400_000 + 4 * CHUNK_TOKENS


def test_a_view_stays_right_after_its_sequence_was_freed() -> None:
    arena = TokenArena()
    (start,) = arena.append(np.array([1, 2, 3], "i4"), offsets_of([3]))
    view = arena.view(int(start), 3)
    arena.free(np.array([start]), np.array([3]))
    for _ in range(5):
        arena.append(np.full(50_000, 9, "i4"), offsets_of([50_000]))
    assert view.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5


def test_a_sequence_longer_than_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {CHUNK_TOKENS} tokens, got {CHUNK_TOKENS + 1}"):
        TokenArena().append(np.zeros(CHUNK_TOKENS + 1, "i4"), offsets_of([CHUNK_TOKENS + 1]))


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=30))
def test_hashes_are_equal_exactly_where_short_sequences_are(sequences: list[list[int]]) -> None:
    offsets = offsets_of([len(s) for s in sequences])
    hashes = sequence_hashes(np.array([t for s in sequences for t in s], "i4"), offsets).tolist()
    for a, ha in zip(sequences, hashes, strict=True):
        for b, hb in zip(sequences, hashes, strict=True):
            assert (a == b) == (ha == hb)
