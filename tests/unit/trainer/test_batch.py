"""Micro-batches hold whole groups and respect the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.trainer.batch import split_groups, split_rows

GROUPS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=12)


def test_groups_are_packed_longest_first():
    batches = split_groups([[2, 2], [10, 9], [3]], budget_tokens=20)
    assert [b.groups for b in batches] == [(1,), (2, 0)]
    assert not any(b.oversized for b in batches)


@given(GROUPS, st.integers(1, 400))
def test_each_group_is_in_exactly_one_micro_batch(lengths, budget):
    batches = split_groups(lengths, budget)
    assert sorted(g for b in batches for g in b.groups) == list(range(len(lengths)))


@given(GROUPS, st.integers(50, 400))
def test_no_forward_pass_exceeds_the_budget_when_each_row_fits(lengths, budget):
    for batch in split_groups(lengths, budget):
        if batch.oversized:
            for chunk in batch.chunks:
                assert len(chunk) * max(lengths[batch.groups[0]][i] for i in chunk) <= budget
        else:
            rows = [n for g in batch.groups for n in lengths[g]]
            assert len(rows) * max(rows) <= budget


def test_row_longer_than_the_budget_goes_alone():
    assert split_rows([5, 100, 6], 50) == ((1,), (2, 0))


def test_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="budget_tokens must be >= 1, got 0"):
        split_groups([[1]], 0)
