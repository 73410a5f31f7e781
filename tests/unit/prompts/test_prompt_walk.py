"""The walk of one searcher over the prompts."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.prompts import PromptWalk

A, B = "a" * 32, "b" * 32


def take(n: int, *args) -> list[int]:
    return list(islice(PromptWalk(*args), n))


@given(st.integers(1, 60), st.integers(0, 2**31 - 1), st.text(max_size=40))
def test_every_pass_visits_each_prompt_once(num_prompts, seed, incarnation):
    ids = take(3 * num_prompts, num_prompts, seed, incarnation)
    for start in range(0, len(ids), num_prompts):
        assert sorted(ids[start : start + num_prompts]) == list(range(num_prompts))


@given(st.integers(0, 2**31 - 1))
def test_the_order_follows_from_seed_and_incarnation_alone(seed):
    assert take(100, 40, seed, A) == take(100, 40, seed, A)


def test_passes_searchers_and_seeds_differ():
    ids = take(80, 40, 0, A)
    assert ids[:40] != ids[40:]
    assert len({tuple(take(40, 40, seed, name)) for seed in (0, 1) for name in (A, B)}) == 4


def test_every_prompt_comes_first_equally_often():
    counts = [0] * 5
    for seed in range(2000):
        counts[next(PromptWalk(5, seed, A))] += 1
    assert all(abs(c - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5 for c in counts)


def test_one_prompt_is_walked_for_ever():
    assert take(4, 1, 0, A) == [0, 0, 0, 0]


@pytest.mark.parametrize(("num_prompts", "seed"), [(0, 0), (-1, 0), (3, -1)])
def test_no_prompts_or_a_negative_seed_are_refused(num_prompts, seed):
    with pytest.raises(ValueError, match="num_prompts must be"):
        PromptWalk(num_prompts, seed, A)
