from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.trainer.shard_rows import R, V, new_rows, prompt_of

from tba.contracts.errors import CorruptObject
from tba.contracts.records import ShardId, TrajectoryId
from tba.trainer import rowstore
from tba.trainer.buffer import AddReport, NewRows, ReplayBuffer
from tba.trainer.columns import sequence_hashes

A, B = "a" * 32, "b" * 32


def make(**options: object) -> ReplayBuffer:
    return ReplayBuffer(**{"capacity_per_prompt": 100, **options})


def texts(buffer: ReplayBuffer, rows: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(buffer.tokens(int(r)).tolist()) for r in rows]


def slots(buffer: ReplayBuffer) -> dict[int, int]:
    """Prompt id -> slot of all prompts that may be drawn."""
    found = buffer.prompts.replayable(0)
    return dict(zip(buffer.prompts.ids(found).tolist(), found.tolist(), strict=True))


def stored(buffer: ReplayBuffer, prompt: int) -> list[tuple[int, ...]]:
    return texts(buffer, buffer.members(slots(buffer)[prompt], 0)) if prompt in slots(buffer) else []


def newest_visit(buffer: ReplayBuffer, prompt: int) -> list[tuple[int, ...]]:
    return texts(buffer, buffer.prompts.visit_rows(slots(buffer)[prompt]))


def ids(buffer: ReplayBuffer, prompt: int) -> list[TrajectoryId]:
    return buffer.trajectory_ids(buffer.members(slots(buffer)[prompt], 0))


# -- rows and visits


def test_a_complete_visit_is_stored_with_all_its_facts() -> None:
    buffer = make()
    report = buffer.add(new_rows(4, V(0, 7, [R([1, 2], 1.5, 3), R([3], 0.5, 2), R([4], None), R([1, 2], 1.5, 3)])))
    assert report == AddReport(added=2, duplicates=1, failed=1, dropped=0, completed_visits=1)
    rows = buffer.members(slots(buffer)[7], 0)
    assert texts(buffer, rows) == [(3,), (1, 2)]
    assert buffer.rewards(rows).tolist() == [0.5, 1.5]
    assert buffer.versions(rows).tolist() == [2, 3]
    assert buffer.multiplicities(rows).tolist() == [1, 2]
    assert buffer.num_tokens(rows).tolist() == [1, 2]
    assert buffer.finish_stop(rows).tolist() == [False, True]
    assert buffer.prompt_ids(rows).tolist() == [7, 7]
    assert buffer.trajectory_ids(rows) == [TrajectoryId(A, 4, 1), TrajectoryId(A, 4, 3)]
    assert buffer.prompt_tokens(7).tolist() == prompt_of(7)
    assert newest_visit(buffer, 7) == [(1, 2), (3,), (1, 2)]
    assert (len(buffer), buffer.num_prompts, buffer.pending_rows) == (2, 1, 0)
    assert (buffer.ingested_rows, buffer.failed_rows, buffer.duplicate_rows) == (3, 1, 1)


def test_rows_of_a_visit_are_drawable_only_when_its_last_row_came() -> None:
    buffer = make()
    first = buffer.add(new_rows(0, V(5, 1, [R([1]), R([2])], size=4)))
    assert first == AddReport(added=0, duplicates=0, failed=0, dropped=0, completed_visits=0)
    buffer.add(new_rows(0, V(5, 1, [R([8]), R([9]), R([7])], size=4), incarnation=B))  # another searcher's visit 5
    assert (buffer.num_prompts, buffer.pending_rows, buffer.prompts.newest_visits(9, 0)) == (0, 5, [])
    assert len(buffer.prompts.replayable(0)) == 0
    last = buffer.add(new_rows(1, V(5, 1, [R([3]), R([4], None)], size=4)))
    assert last == AddReport(added=3, duplicates=0, failed=1, dropped=0, completed_visits=1)
    assert stored(buffer, 1) == [(1,), (2,), (3,)]
    assert buffer.pending_rows == 3


def test_a_visit_without_any_reward_changes_nothing_that_may_be_drawn() -> None:
    buffer = make()
    report = buffer.add(new_rows(0, V(0, 1, [R([1], None), R([2], None)])))
    assert report == AddReport(added=0, duplicates=0, failed=2, dropped=0, completed_visits=0)
    assert (len(buffer), buffer.num_prompts, buffer.complete_visits) == (0, 0, 0)


def test_the_newest_visit_of_a_prompt_is_the_last_to_complete_whatever_its_policy() -> None:
    buffer = make()
    buffer.add(new_rows(0, V(0, 1, [R([1], version=5)])))
    buffer.add(new_rows(1, V(1, 1, [R([2], version=4)], size=2)))
    buffer.add(new_rows(2, V(2, 1, [R([3], version=5)])))
    assert newest_visit(buffer, 1) == [(3,)]
    buffer.add(new_rows(3, V(1, 1, [R([4], None)], size=2)))
    assert newest_visit(buffer, 1) == [(2,)]
    assert stored(buffer, 1) == [(1,), (3,), (2,)]


# -- duplicates


def test_the_newest_of_equal_responses_wins_and_older_visits_refer_to_it() -> None:
    buffer = make()
    buffer.set_reference("r")
    buffer.add(new_rows(0, V(0, 1, [R([1, 1], 0.0, 2), R([2], 0.0, 2)])))
    old = buffer.members(slots(buffer)[1], 0)
    buffer.set_ref_logprobs(old, np.array([-3.0, -4.0]))
    buffer.set_mu_logprobs(old, np.array([-5.0, -6.0]))
    report = buffer.add(new_rows(1, V(1, 1, [R([1, 1], 1.0, 3)])))
    assert (report.added, report.duplicates) == (0, 1)
    rows = buffer.members(slots(buffer)[1], 0)
    assert texts(buffer, rows) == [(2,), (1, 1)]
    assert ids(buffer, 1) == [TrajectoryId(A, 0, 1), TrajectoryId(A, 1, 0)]
    assert buffer.rewards(rows).tolist() == [0.0, 1.0]
    assert buffer.versions(rows).tolist() == [2, 3]
    assert buffer.multiplicities(rows).tolist() == [1, 2]
    assert buffer.ref_logprobs(rows).tolist() == [-4.0, -3.0]  # of the same tokens under the same reference
    assert np.isnan(buffer.mu_logprobs(rows)).tolist() == [False, True]  # the new record has not been used


def test_an_equal_response_of_an_older_policy_that_comes_late_only_counts() -> None:
    buffer = make()
    buffer.add(new_rows(0, V(0, 1, [R([1], 0.0, 5)])))
    buffer.add(new_rows(1, V(1, 1, [R([1], 1.0, 3), R([2], 1.0, 3)])))
    rows = buffer.members(slots(buffer)[1], 0)
    assert ids(buffer, 1) == [TrajectoryId(A, 0, 0), TrajectoryId(A, 1, 1)]
    assert buffer.versions(rows).tolist() == [5, 3]
    assert buffer.multiplicities(rows).tolist() == [2, 1]


def test_a_visit_refers_to_the_rows_that_replaced_its_own() -> None:
    buffer = make()
    buffer.add(new_rows(0, V(0, 1, [R([1], version=5), R([2], version=5)])))
    buffer.add(new_rows(1, V(1, 1, [R([1], version=6), R([2], version=4), R([3], version=4)])))
    rows = buffer.prompts.visit_rows(slots(buffer)[1])
    assert texts(buffer, rows) == [(1,), (2,), (3,)]
    assert buffer.versions(rows).tolist() == [6, 5, 4]


def test_without_deduplication_every_response_is_kept() -> None:
    buffer = make(deduplicate=False)
    report = buffer.add(new_rows(0, V(0, 1, [R([1]), R([1]), R([1])])))
    assert (report.added, report.duplicates) == (3, 0)
    assert stored(buffer, 1) == [(1,)] * 3


def test_unequal_responses_with_equal_hashes_are_both_kept() -> None:
    rng = np.random.default_rng(0)
    tokens = np.unique(rng.integers(0, 2**31, (400_000, 2), dtype=np.int32), axis=0)
    hashes = sequence_hashes(tokens.ravel(), np.arange(len(tokens) + 1, dtype="i8") * 2)
    order = np.argsort(hashes)
    (hit, *_) = np.flatnonzero(np.diff(hashes[order].astype("i8")) == 0)
    one, two = tokens[order[hit]].tolist(), tokens[order[hit + 1]].tolist()
    buffer = make()
    buffer.add(new_rows(0, V(0, 1, [R(one), R(two), R(one)])))
    assert stored(buffer, 1) == [tuple(two), tuple(one)]


def test_equal_responses_to_different_prompts_are_different() -> None:
    buffer = make()
    assert buffer.add(new_rows(0, V(0, 1, [R([1])]), V(1, 2, [R([1])]))).duplicates == 0


# -- caps


def test_the_oldest_responses_of_a_full_prompt_go_first() -> None:
    buffer = make(capacity_per_prompt=3)
    buffer.add(new_rows(0, V(0, 1, [R([1]), R([2])]), V(1, 2, [R([1])])))
    report = buffer.add(new_rows(1, V(2, 1, [R([1]), R([3]), R([4])])))  # renews 1
    assert report == AddReport(added=2, duplicates=1, failed=0, dropped=1, completed_visits=1)
    assert stored(buffer, 1) == [(1,), (3,), (4,)]
    assert stored(buffer, 2) == [(1,)]


def test_the_newest_visit_is_kept_whole_even_beyond_the_capacity() -> None:
    buffer = make(capacity_per_prompt=2)
    buffer.add(new_rows(0, V(0, 1, [R([i]) for i in range(5)])))
    assert stored(buffer, 1) == [(0,), (1,), (2,), (3,), (4,)]
    buffer.add(new_rows(1, V(1, 1, [R([9])])))
    assert stored(buffer, 1) == [(4,), (9,)]


def test_the_global_cap_drops_in_order_of_arrival_over_all_prompts() -> None:
    buffer = make(max_trajectories=4)
    buffer.add(new_rows(0, V(0, 1, [R([1]), R([2])]), V(1, 2, [R([3]), R([4])])))
    report = buffer.add(new_rows(1, V(2, 1, [R([1])]), V(3, 3, [R([5]), R([6])])))  # renews 1
    assert (report.dropped, len(buffer)) == (2, 4)
    assert (stored(buffer, 1), stored(buffer, 2), stored(buffer, 3)) == ([(1,)], [(4,)], [(5,), (6,)])
    assert buffer.set_max_trajectories(1) == 3
    assert (stored(buffer, 1), stored(buffer, 2), stored(buffer, 3)) == ([], [], [(6,)])
    assert buffer.set_max_trajectories(None) == 0


def test_many_drops_after_few_are_of_the_oldest_rows_each_once() -> None:
    limit = 200
    buffer = make(max_trajectories=limit)
    begin = 0
    for size in (limit, 1, 10, 3, 50, 2, 120):
        prompts = range(begin, begin + size)
        report = buffer.add(new_rows(begin, *(V(p, p, [R([p])]) for p in prompts)))
        begin += size
        assert report.dropped == min(size, begin - limit)
        assert [p for p in range(begin) if p in slots(buffer) and stored(buffer, p)] == list(
            range(begin - limit, begin)
        )
        assert len(buffer) == limit


def test_a_pending_visit_that_lost_a_row_to_the_cap_never_becomes_drawable() -> None:
    buffer = make(max_trajectories=3)
    buffer.add(new_rows(0, V(0, 1, [R([1]), R([2])], size=3)))
    report = buffer.add(new_rows(1, V(1, 2, [R([3]), R([4])])))
    assert (report.dropped, len(buffer), buffer.pending_rows) == (2, 2, 0)
    report = buffer.add(new_rows(2, V(0, 1, [R([5])], size=3)))
    assert (report.dropped, report.completed_visits, stored(buffer, 1)) == (1, 0, [])
    buffer.add(new_rows(3, V(9, 1, [R([6])])))
    assert stored(buffer, 1) == [(6,)]


def test_memory_stays_within_40_bytes_and_8_a_token() -> None:
    rng = np.random.default_rng(0)
    buffer = make(capacity_per_prompt=100)
    for seq in range(400):
        responses = [R(rng.integers(0, 9999, 64).tolist()) for _ in range(25)]
        buffer.add(new_rows(seq, V(seq, seq % 50, responses)))
    assert len(buffer) == 5000
    assert buffer.memory_bytes / len(buffer) <= 40 + 8 * 64


# -- against a naive model

responses = st.builds(
    R,
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=2),
    reward=st.sampled_from([None, 0.0, 1.0]),
    version=st.integers(0, 3),
)
visits = st.lists(
    st.tuples(st.integers(0, 2), st.lists(responses, min_size=1, max_size=4), st.integers(0, 4)), max_size=14
)


class Naive:
    """The rules of buffer.py on lists, with (tokens, version, arrival, count) a row."""

    def __init__(self, capacity: int, limit: int | None) -> None:
        self.capacity, self.limit = capacity, limit
        self.rows: dict[int, list[list]] = {}
        self.visit: dict[int, list[tuple]] = {}
        self.arrivals = 0

    def add(self, prompt: int, responses: list[R]) -> None:
        members, scored = self.rows.setdefault(prompt, []), [r for r in responses if r.reward is not None]
        for response in scored:
            tokens = tuple(response.tokens)
            row = [tokens, response.version, self.arrivals, 1]
            self.arrivals += 1
            equal = next((m for m in members if m[0] == tokens), None)
            if equal is not None and equal[1] > response.version:
                equal[3] += 1
                continue
            if equal is not None:
                row[3] += equal[3]
                members.remove(equal)
            members.append(row)
        if scored:
            self.visit[prompt] = [tuple(r.tokens) for r in scored]
            others = [m for m in members if m[0] not in self.visit[prompt]]
            for row in others[: max(0, len(members) - self.capacity)]:
                members.remove(row)

    def trim(self) -> None:
        everything = sorted((m[2], p, m) for p, members in self.rows.items() for m in members)
        for _, prompt, row in everything[: max(0, len(everything) - (self.limit or 10**9))]:
            self.rows[prompt].remove(row)
            self.visit[prompt] = [t for t in self.visit[prompt] if t != row[0]]


@given(steps=visits, capacity=st.integers(2, 5), limit=st.none() | st.integers(2, 9), share=st.sampled_from([1, 2, 64]))
@settings(max_examples=200, deadline=None)
def test_buffer_holds_what_a_naive_model_holds(steps: list, capacity: int, limit: int | None, share: int) -> None:
    with patch.object(rowstore, "_QUEUE_SHARE", share):  # 64: what so few rows never get to
        compare_with_naive(steps, capacity, limit)


def compare_with_naive(steps: list, capacity: int, limit: int | None) -> None:
    buffer, naive = make(capacity_per_prompt=capacity, max_trajectories=limit), Naive(capacity, limit)
    kept: dict[ShardId, NewRows] = {}
    for seq, (prompt, rows, _) in enumerate(steps):
        shard = new_rows(seq, V(seq, prompt, rows))
        kept[shard.shard] = shard
        buffer.add(shard)
        naive.add(prompt, rows)
        naive.trim()
        if seq == len(steps) // 2:
            buffer = restored(buffer, kept, capacity_per_prompt=capacity, max_trajectories=limit)
    for prompt in range(3):
        expected = naive.rows.get(prompt, [])
        assert stored(buffer, prompt) == [m[0] for m in expected]
        if expected:
            rows = buffer.members(slots(buffer)[prompt], 0)
            assert buffer.versions(rows).tolist() == [m[1] for m in expected]
            assert buffer.multiplicities(rows).tolist() == [m[3] for m in expected]
            assert newest_visit(buffer, prompt) == naive.visit[prompt]


# -- caches


def test_a_change_of_the_reference_forgets_its_log_probabilities_but_not_those_of_first_use() -> None:
    buffer = make()
    buffer.set_reference("1/0")
    buffer.add(new_rows(0, V(0, 1, [R([1]), R([2])])))
    rows = buffer.members(slots(buffer)[1], 0)
    assert np.isnan(buffer.ref_logprobs(rows)).all()
    buffer.set_ref_logprobs(rows[:1], np.array([-1.5]))
    buffer.set_mu_logprobs(rows, np.array([-2.5, -3.5]))
    buffer.set_reference("1/0")
    assert buffer.ref_logprobs(rows)[0] == -1.5
    buffer.set_reference("1/50")
    assert np.isnan(buffer.ref_logprobs(rows)).all()
    assert buffer.mu_logprobs(rows).tolist() == [-2.5, -3.5]


# -- checkpoints


def restored(buffer: ReplayBuffer, shards: dict[ShardId, NewRows], **options: object) -> ReplayBuffer:
    other = make(**options)
    other.restore(buffer.state(), lambda wanted: [shards[s] for s in reversed(wanted)])
    return other


def example() -> tuple[ReplayBuffer, dict[ShardId, NewRows]]:
    buffer = make(max_trajectories=6)
    buffer.set_reference("1/0")
    shards = [
        new_rows(0, V(0, 1, [R([1], 0.5), R([2]), R([3])]), V(1, 2, [R([4, 4]), R([4, 4])])),
        new_rows(1, V(2, 2, [R([4, 4], 1.0, 2), R([6], None)])),
        new_rows(0, V(2, 3, [R([7]), R([8])], size=3), incarnation=B),
        new_rows(2, V(3, 1, [R([9], 1.0, 3)])),
    ]
    for shard in shards:
        buffer.add(shard)
    rows = buffer.members(slots(buffer)[1], 0)
    buffer.set_ref_logprobs(rows[:1], np.array([-1.25]))
    buffer.set_mu_logprobs(rows[1:], np.array([-2.25]))
    return buffer, {s.shard: s for s in shards}


def test_a_restored_buffer_holds_the_same_rows_caches_counters_and_pending_visits() -> None:
    buffer, shards = example()
    other = restored(buffer, shards, max_trajectories=6)
    for name in ("ingested_rows", "failed_rows", "duplicate_rows", "dropped_rows", "complete_visits", "num_prompts"):
        assert getattr(buffer, name) == getattr(other, name) > 0
    assert (len(other), other.pending_rows) == (len(buffer), buffer.pending_rows) == (6, 2)
    for prompt in (1, 2):
        assert stored(other, prompt) == stored(buffer, prompt)
        assert newest_visit(other, prompt) == newest_visit(buffer, prompt)
        assert ids(other, prompt) == ids(buffer, prompt)
        assert other.prompt_tokens(prompt).tolist() == prompt_of(prompt)
    a, b = (x.members(slots(x)[1], 0) for x in (buffer, other))
    for name in ("rewards", "versions", "multiplicities", "finish_stop", "ref_logprobs", "mu_logprobs"):
        np.testing.assert_array_equal(getattr(buffer, name)(a), getattr(other, name)(b))
    other.set_reference("1/0")
    assert buffer.ref_logprobs(a).tolist()[0] == other.ref_logprobs(b).tolist()[0] == -1.25
    last = new_rows(1, V(2, 3, [R([5])], size=3), incarnation=B)
    assert buffer.add(last) == other.add(last)
    assert stored(other, 3) == stored(buffer, 3) == [(7,), (8,), (5,)]


def test_state_holds_numbers_only_and_no_tokens() -> None:
    short, long = make(), make()
    short.add(new_rows(0, V(0, 1, [R([1]), R([2])])))
    long.add(new_rows(0, V(0, 1, [R([1] * 5000), R([2] * 5000)])))
    size = [sum(a.nbytes for a in b.state().values()) for b in (short, long)]
    assert size[0] == size[1]
    assert {a.dtype.kind for a in long.state().values()} <= set("iufb")


def test_an_empty_buffer_can_be_saved_and_restored() -> None:
    other = restored(make(), {})
    assert other.add(new_rows(0, V(0, 1, [R([1])]))).added == 1


@pytest.mark.parametrize("harm", ["gone", "without rows"])
def test_rows_of_a_lost_shard_leave_members_visits_and_pending_together(harm: str) -> None:
    buffer = make()
    shards = [
        new_rows(0, V(0, 1, [R([1]), R([2])]), V(1, 2, [R([3])]), V(2, 3, [R([4])], size=3)),
        new_rows(1, V(3, 1, [R([5], version=2)]), V(2, 3, [R([6])], size=3), V(4, 4, [R([7])])),
    ]
    for shard in shards:
        buffer.add(shard)
    empty = new_rows(1, incarnation=shards[1].shard.incarnation)
    other = make()
    given = [shards[0]] if harm == "gone" else [shards[0], empty]
    assert other.restore(buffer.state(), lambda wanted: given) == {shards[1].shard: 3}
    assert stored(other, 1) == [(1,), (2,)] and stored(other, 2) == [(3,)]
    assert newest_visit(other, 2) == newest_visit(buffer, 2)
    assert (other.num_prompts, other.prompts.newest_version()) == (2, 0), "prompt 4 had no other row"
    # Visit 2 of prompt 3 lost a pending row: the rest of it would favour late finishers, so it goes as a whole.
    assert (len(other), other.pending_rows, other.dropped_rows) == (3, 0, 3 + 1)
    assert (other.ingested_rows, other.complete_visits) == (buffer.ingested_rows, buffer.complete_visits)
    other.add(new_rows(2, V(2, 3, [R([8])], size=3)))
    assert stored(other, 3) == [] and len(other) == 3
    other.add(new_rows(3, V(5, 4, [R([9])])))
    assert stored(other, 4) == [(9,)] and other.prompt_tokens(4).tolist() == prompt_of(4)
    again = restored(other, {s.shard: s for s in (shards[0], new_rows(3, V(5, 4, [R([9])])))})
    assert [stored(again, p) for p in (1, 2, 4)] == [stored(other, p) for p in (1, 2, 4)]


def test_a_buffer_whose_shards_are_all_lost_is_empty_and_goes_on() -> None:
    buffer, shards = example()
    other = make()
    lost = other.restore(buffer.state(), lambda wanted: [])
    assert (sum(lost.values()), len(other), other.pending_rows, other.num_prompts) == (len(buffer), 0, 0, 0)
    assert other.add(new_rows(7, V(9, 1, [R([1])]))).added == 1


def test_restore_refuses_a_used_buffer() -> None:
    buffer, _ = example()
    with pytest.raises(ValueError, match="needs a new buffer"):
        buffer.restore(buffer.state(), lambda wanted: [])


# -- refusals


def broken(**columns: object) -> NewRows:
    good = new_rows(0, V(0, 1, [R([1]), R([2])], size=4))
    fields = {name: getattr(good, name) for name in NewRows.__slots__}
    return NewRows(**{**fields, **{n: np.asarray(c) for n, c in columns.items()}})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (broken(rewards=np.array([np.nan, 0.0])), "finite rewards of scored rows"),
        (broken(visit_sizes=np.array([4, 3])), "one prompt and one size in visit 0"),
        (broken(visit_sizes=np.array([1, 1])), "at most visitSize rows in visit 0"),
        (broken(visit_sizes=np.array([0, 0])), "visit sizes >= 1"),
        (broken(prompt_ids=np.array([1, 2])), "one prompt and one size"),
        (broken(prompt_ids=np.array([-1, -1])), "prompt ids >= 0"),
        (broken(effective_versions=np.array([-1, 0])), "effective versions"),
        (broken(response_offsets=np.array([0, 1, 3])), "offsets that cover their tokens"),
        (broken(outcomes=np.zeros(3)), "columns of one length"),
        (new_rows(1, V(7, 1, [R([1])] * 3, size=4)), "which 2 came before"),
        (new_rows(1, V(7, 2, [R([1])], size=4)), "go on with prompt 1"),
        (new_rows(1, V(7, 1, [R([1])], size=5)), "fill 4 rows"),
    ],
)
def test_rows_that_contradict_themselves_are_refused_before_anything_changed(rows: NewRows, message: str) -> None:
    buffer = make()
    buffer.add(new_rows(0, V(7, 1, [R([1]), R([2])], size=4)))
    before = buffer.state()
    with pytest.raises(CorruptObject, match=message):
        buffer.add(rows)
    after = buffer.state()
    assert all(np.array_equal(before[n], after[n], equal_nan=before[n].dtype.kind == "f") for n in before)
