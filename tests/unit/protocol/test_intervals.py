import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts.records import IngestState, ShardId
from tba.protocol.intervals import IngestSet, contains, count, ingested_ids, with_ingested

A, B = "a" * 32, "b" * 32
shard_ids = st.lists(st.builds(ShardId, st.sampled_from([A, B]), st.integers(0, 12)), unique=True)


def test_a_filled_gap_joins_both_neighbours_and_leaves_other_incarnations_alone():
    state = with_ingested(IngestState(), ShardId(A, 0), ShardId(A, 1), ShardId(A, 3), ShardId(B, 7))
    assert state.intervals == {A: [(0, 2), (3, 4)], B: [(7, 8)]}
    joined = with_ingested(state, ShardId(A, 2))
    assert joined.intervals == {A: [(0, 4)], B: [(7, 8)]}
    assert state.intervals[A] == [(0, 2), (3, 4)], "the old value is unchanged"
    assert (count(joined), contains(joined, ShardId(A, 3)), contains(joined, ShardId(A, 4))) == (5, True, False)


@given(shard_ids, st.randoms())
def test_the_record_depends_on_the_set_alone_and_answers_as_the_set(ids, rng):
    shuffled = list(ids)
    rng.shuffle(shuffled)
    one_by_one = IngestState(lowest_unswept_window=3)
    for shard_id in shuffled:
        one_by_one = with_ingested(one_by_one, shard_id)
    bulk = IngestSet()
    for shard_id in ids:
        bulk.add(shard_id)
    assert one_by_one == bulk.state(3) == with_ingested(IngestState(lowest_unswept_window=3), *ids)
    assert set(ingested_ids(one_by_one)) == set(ids) and count(one_by_one) == len(bulk) == len(ids)
    everything = [ShardId(i, s) for i in (A, B) for s in range(14)]
    assert (
        [contains(one_by_one, i) for i in everything]
        == [i in ids for i in everything]
        == [i in bulk for i in everything]
    )
    for intervals in one_by_one.intervals.values():
        assert all(s < e for s, e in intervals)
        assert all(e < s for (_, e), (s, _) in zip(intervals, intervals[1:], strict=False)), "disjoint, never adjacent"
    assert IngestSet(IngestState.model_validate_json(one_by_one.to_json())).state(3) == one_by_one


@given(shard_ids.filter(bool), st.data())
def test_ingesting_a_shard_again_is_refused(ids, data):
    state = with_ingested(IngestState(), *ids)
    again = data.draw(st.sampled_from(ids))
    with pytest.raises(ValueError, match="ingested once"):
        with_ingested(state, again)
    with pytest.raises(ValueError, match="ingested once"):
        IngestSet(state).add(again)


def test_the_same_shard_twice_in_one_call_is_refused():
    with pytest.raises(ValueError, match="ingested once"):
        with_ingested(IngestState(), ShardId(A, 1), ShardId(A, 1))


@pytest.mark.parametrize("intervals", [[(0, 2), (2, 3)], [(3, 4), (0, 1)], [(2, 2)], [(0, 5), (3, 8)], [(-1, 2)]])
def test_malformed_intervals_of_a_checkpoint_are_refused(intervals):
    with pytest.raises(ValueError, match="intervals must be sorted"):
        IngestSet(IngestState(intervals={A: intervals}))


def test_a_negative_seq_is_refused():
    with pytest.raises(ValueError, match="seq must be >= 0"):
        with_ingested(IngestState(), ShardId(A, -1))


def test_a_hundred_thousand_shards_in_random_order_take_seconds_at_most():
    ids = [ShardId(f"{i:032x}", seq) for i in range(100) for seq in range(1000)]
    random.Random(0).shuffle(ids)
    started = time.perf_counter()
    bulk = IngestSet()
    for shard_id in ids:
        bulk.add(shard_id)
    assert count(bulk.state(0)) == 100_000 and len(bulk.state(0).intervals[f"{0:032x}"]) == 1
    assert time.perf_counter() - started < 10
