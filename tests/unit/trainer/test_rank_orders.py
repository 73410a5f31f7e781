"""What ranks tell each other survives the way; who is which rank."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tba.trainer.rankprocesses import RankProcesses, own_rank, torchrun_size
from tba.trainer.ranks import Order

ARRAYS = st.sampled_from(["<i8", "<i4", "<f4", "|u1", "|b1"]).flatmap(
    lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@given(
    st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.floats(allow_nan=False), st.text(max_size=8))),
    st.dictionaries(st.text(max_size=12), ARRAYS, max_size=4),
)
def test_an_order_arrives_as_it_was_sent(facts, given_arrays):
    got = Order.decode(Order("step", facts, given_arrays).encode())
    assert got.kind == "step" and got.facts == facts
    assert list(got.arrays) == list(given_arrays)
    for name, array in given_arrays.items():
        assert got.arrays[name].dtype == array.dtype and got.arrays[name].flags.writeable
        np.testing.assert_array_equal(got.arrays[name], array)


@pytest.mark.parametrize(
    ("environment", "rank", "size"),
    [
        ({}, 0, 0),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 0, 0),  # somebody else's
        ({"RANK": "1", "WORLD_SIZE": "2", "TBA_RANK_STORE": "127.0.0.1 1"}, 1, 0),
        ({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host"}, 3, 8),
    ],
)
def test_rank_and_size_are_those_of_the_environment(environment, rank, size):
    assert (own_rank(environment), torchrun_size(environment)) == (rank, size)


@pytest.mark.parametrize(("ranks", "first_device"), [((1, 2), 1), ((3, 4, 5), 0)])
def test_ranks_know_how_many_share_their_host_rank_0_included(tmp_path, ranks, first_device):
    tell = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(os.environ['LOCAL_WORLD_SIZE'])"
    argv, store = [sys.executable, "-c", tell], ("127.0.0.1", 1)
    RankProcesses(ranks, argv, size=6, store=store, first_device=first_device).close(seconds=30.0)
    assert {int(file.name): file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(ranks, "3")
