"""Every tensor has one owner, all ranks agree on it, and no share is much larger than the others."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.trainer.shares import assign

SIZES = st.dictionaries(st.text(max_size=4), st.integers(0, 10**6), max_size=30)
OWNERS = st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True)


def loads(sizes: dict[str, int], owners: list[int]) -> list[int]:
    found = assign(sizes, owners)
    return [sum(size for name, size in sizes.items() if found[name] == owner) for owner in owners]


def test_the_largest_tensors_are_dealt_first_to_who_has_the_least():
    sizes = {"embed": 10, "a": 6, "b": 5, "c": 4, "norm": 1}
    assert assign(sizes, [0, 3]) == {"embed": 0, "a": 3, "b": 3, "c": 0, "norm": 3}
    assert loads(sizes, [0, 3]) == [14, 12]
    assert set(assign(sizes, [2]).values()) == {2}, "one owner has all"


def test_tensors_of_equal_size_are_dealt_in_name_order_to_the_owners_in_theirs():
    assert assign(dict.fromkeys("cba", 7), [5, 1]) == {"a": 5, "b": 1, "c": 5}


@given(SIZES, OWNERS, st.randoms(use_true_random=False))
def test_each_tensor_has_one_owner_which_does_not_depend_on_the_order_of_names(
    sizes: dict[str, int], owners: list[int], rng: random.Random
):
    found = assign(sizes, owners)
    assert found.keys() == sizes.keys() and set(found.values()) <= set(owners)
    names = list(sizes)
    rng.shuffle(names)
    assert assign({name: sizes[name] for name in names}, owners) == found


@given(SIZES, OWNERS)
def test_no_share_exceeds_the_mean_by_a_whole_tensor(sizes: dict[str, int], owners: list[int]):
    n = len(owners)  # whole numbers on both sides: the bound is reached exactly by one tensor and many owners
    assert n * max(loads(sizes, owners)) <= sum(sizes.values()) + (n - 1) * max(sizes.values(), default=0)


@pytest.mark.parametrize("owners", [[], [0, 1, 0]])
def test_no_owner_and_an_owner_named_twice_are_refused(owners: list[int]):
    with pytest.raises(ValueError, match="each once"):
        assign({"w": 1}, owners)
