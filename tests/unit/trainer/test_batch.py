"""Micro-batches hold whole groups and respect the budget of tokens that are really computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.trainer.batch import GroupTokens, MicroBatch, Passes, deal, split_groups, split_rows

GROUPS = st.lists(
    st.builds(
        GroupTokens,
        prompt=st.integers(1, 50),
        responses=st.lists(st.integers(1, 50), min_size=1, max_size=6).map(tuple),
        shared=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def test_a_shared_prompt_counts_once_and_one_that_is_not_counts_in_each_row():
    assert GroupTokens(10, (1, 2, 3)).total == 16
    assert GroupTokens(10, (1, 2, 3), shared=False).total == 36
    assert GroupTokens(10, (1, 2, 3)).of([0, 2]) == 14 and GroupTokens(10, (1,)).of([]) == 0


def test_largest_groups_come_first_and_small_ones_fill_the_gaps():
    groups = [GroupTokens(2, (2,)), GroupTokens(1, (11,)), GroupTokens(1, (5, 4)), GroupTokens(1, (7,))]
    batches = split_groups(groups, budget_tokens=16)
    assert [b.groups for b in batches] == [(1, 0), (2,), (3,)]
    assert not any(b.oversized for b in batches)


@given(GROUPS, st.integers(1, 400))
def test_each_group_is_in_exactly_one_micro_batch_and_each_row_of_it_in_one_piece(groups, budget):
    batches = split_groups(groups, budget)
    assert sorted(g for b in batches for g in b.groups) == list(range(len(groups)))
    for batch in batches:
        if batch.oversized:
            rows = sorted(row for chunk in batch.chunks for row in chunk)
            assert rows == list(range(len(groups[batch.groups[0]].responses)))


@given(GROUPS, st.integers(1, 400))
def test_no_forward_pass_exceeds_the_budget_unless_it_is_one_row(groups, budget):
    for batch in split_groups(groups, budget):
        if batch.oversized:
            (group,) = batch.groups
            assert all(groups[group].of(chunk) <= budget or len(chunk) == 1 for chunk in batch.chunks)
        else:
            one_row = len(batch.groups) == len(groups[batch.groups[0]].responses) == 1
            assert sum(groups[g].total for g in batch.groups) <= budget or one_row


@given(GROUPS, st.integers(50, 400))
def test_no_two_micro_batches_would_fit_into_one(groups, budget):
    sizes = [sum(groups[g].total for g in b.groups) for b in split_groups(groups, budget) if not b.oversized]
    assert all(a + b > budget for i, a in enumerate(sizes) for b in sizes[:i])


def test_row_longer_than_the_budget_goes_alone():
    assert split_rows(GroupTokens(3, (2, 97, 3)), 20) == ((1,), (2, 0))


def test_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="budget_tokens must be >= 1, got 0"):
        split_groups([GroupTokens(1, (1,))], 0)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_each_item_is_dealt_to_one_rank_and_none_has_more_than_the_mean_and_one_item(costs, num_ranks):
    hands = deal(costs, num_ranks)
    assert len(hands) == num_ranks
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    most = max((sum(costs[i] for i in hand) for hand in hands), default=0)
    assert most <= sum(costs) / num_ranks + max(costs, default=0)


def test_all_ranks_run_as_many_passes_as_the_one_with_the_most_of_each_kind():
    oversized, whole = MicroBatch((0,), ((0,), (1,), (2,))), MicroBatch((1, 2))
    assert Passes.most([[whole]]) == Passes(0, 1)
    assert Passes.most([[oversized, whole], [whole] * 5]) == Passes(3, 5)
    assert Passes.most([[oversized, whole], [], [oversized]]) == Passes(3, 4)
