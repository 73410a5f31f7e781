"""Two nodes train as one rank does, and end together: real process trees at two loopback addresses, gloo."""

import os
import signal

import pytest
from safetensors.torch import load_file
from support.pids import children_of, wait_until_gone
from support.rank_results import TwoNodes, largest_difference, run_ranks

from tba.contracts.errors import LeftAlone, UserError

TOLERANCE = 1e-6
RECIPES = ["plain", "oversized", "ema"]


@pytest.fixture
def two_nodes():
    """A maker of them, which leaves none behind."""
    made: list[TwoNodes] = []

    def make(*arguments) -> TwoNodes:
        made.append(TwoNodes(*arguments))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_nodes_give_the_update_of_one_rank(two_nodes, tmp_path, ranks):
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    recipes = RECIPES if ranks == 1 else RECIPES[:1]
    run_ranks(1, alone, *recipes, OMP_NUM_THREADS="1")
    first, second, told = two_nodes(ranks, together, *recipes).end()
    assert (first, second) == (0, 0), told[-4000:]
    for recipe in recipes:
        one, two = (load_file(folder / f"{recipe}.safetensors") for folder in (alone, together))
        for what in ("master/", "staged/", "optimizer/"):
            assert largest_difference(one, two, what) <= TOLERANCE, (recipe, what)


def test_an_error_that_all_ranks_raise_ends_both_nodes_with_its_own_code(two_nodes, tmp_path):
    first, second, told = two_nodes(1, tmp_path, "refused").end()
    assert (first, second) == (UserError.exit_code, UserError.exit_code)
    assert "cannot compute packed rows" in told and "trainer rank 1 ended" not in told


@pytest.fixture
def training(two_nodes, tmp_path):
    """Two nodes amid their steps, and the pid of rank 1, which is on node 1."""
    nodes = two_nodes(1, tmp_path, "forever")
    while "training" not in nodes.leader.stderr.readline():
        assert nodes.leader.poll() is None
    return nodes, children_of(nodes.node.pid)[0]


def test_a_rank_that_is_killed_on_another_node_ends_rank_0_with_words_for_it(training):
    nodes, rank = training
    os.kill(rank, signal.SIGKILL)
    first, second, told = nodes.end(30)
    assert (first, second) == (7, LeftAlone.exit_code)
    assert "trainer rank 1 ended with SIGKILL" in told and "(node 1)" in told


def test_a_node_that_is_killed_ends_rank_0_with_words_for_it_and_leaves_no_rank(training):
    nodes, rank = training
    nodes.node.kill()
    first, _, told = nodes.end(30)
    assert first == 7
    assert "trainer node 1 is gone" in told
    wait_until_gone(rank)


def test_rank_0_that_is_killed_ends_the_other_node_and_its_ranks(training):
    nodes, rank = training
    nodes.leader.kill()
    assert nodes.end(30)[:2] == (-signal.SIGKILL, LeftAlone.exit_code)
    wait_until_gone(rank)


def test_a_node_that_is_asked_to_end_tells_rank_0_and_goes_on_training(training):
    nodes, rank = training
    nodes.node.send_signal(signal.SIGTERM)
    while "node 1 is asked to end" not in nodes.leader.stderr.readline():
        assert nodes.leader.poll() is None
    with pytest.raises(AssertionError):
        wait_until_gone(rank, 2.0)
    assert nodes.node.poll() is None
