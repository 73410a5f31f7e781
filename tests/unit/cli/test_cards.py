"""GPUs of one machine shared out over the processes of `tba run`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.cli.cards import Cards, share_out, visible_cards
from tba.contracts.errors import UserError

CASES = [  # cards, ranks, searchers, of each -> trainer, searchers
    ("01", 1, 1, 1, "0", ["1"]),
    ("0123", 1, 3, 1, "0", ["1", "2", "3"]),
    ("01", 1, 3, 1, "0", ["1", "1", "1"]),
    ("0", 1, 2, 1, "0", ["0", "0"]),
    ("01234567", 4, 2, 2, "0123", ["45", "67"]),
    ("0123", 1, 2, 2, "0", ["12", "12"]),
    ("01", 1, 1, 2, "0", ["01"]),
    ("01", 2, 1, 1, "01", ["0"]),
    ("012", 1, 0, 1, "0", []),
]


@pytest.mark.parametrize(("cards", "ranks", "searchers", "each", "trainer", "found"), CASES)
def test_the_trainer_has_the_first_cards_and_searchers_the_others_in_turn(
    cards, ranks, searchers, each, trainer, found
):
    shares = share_out(list(cards), ranks=ranks, searchers=searchers, each=each)
    assert "".join(shares.trainer) == trainer
    assert ["".join(s) for s in shares.searchers] == found


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), st.integers(1, 4))
def test_a_searcher_has_cards_of_its_own_as_long_as_there_are_enough(num, ranks, searchers, each):
    cards = [str(i) for i in range(num)]
    if ranks > num or (searchers and each > num):
        with pytest.raises(UserError):
            share_out(cards, ranks=ranks, searchers=searchers, each=each)
        return
    shares = share_out(cards, ranks=ranks, searchers=searchers, each=each)
    assert all(len(set(s)) == each for s in shares.searchers)
    if ranks + searchers * each <= num:
        assert not shares.shared()


def test_without_cards_nothing_is_said():
    shares = share_out([], ranks=2, searchers=2, each=4)
    assert shares == Cards() and shares.of_trainer() == shares.of_searcher(1) == {} and not shares.describe()


@pytest.mark.parametrize(
    ("ranks", "each", "field"), [(3, 1, "trainer.gpusPerNode is 3"), (1, 4, "tensorParallelSize is 4")]
)
def test_too_few_cards_are_told_with_what_there_is(ranks, each, field):
    with pytest.raises(UserError, match=f"{field}.*shows 2 GPUs"):
        share_out(["0", "GPU-7"], ranks=ranks, searchers=1, each=each)


def test_who_shares_a_card_is_known_and_shown():
    shares = share_out(["3", "5"], ranks=1, searchers=2, each=1)
    assert shares.shared() == {"5": ["searcher-0", "searcher-1"]}
    assert shares.describe() == "trainer 3, searcher-0 5, searcher-1 5"
    assert shares.of_searcher(1) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_the_environment_wins_over_the_driver(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert visible_cards({}, tmp_path) == ("0", "1")
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "1, GPU-a"}, tmp_path) == ("1", "GPU-a")
    assert visible_cards({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()
    assert visible_cards({}, tmp_path / "none") == ()


def test_parts_of_a_cut_up_gpu_are_nobodys_to_share_out(tmp_path):
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "capabilities" / "gpu0" / "mig" / "gi1").mkdir(parents=True)
    assert visible_cards({}, tmp_path) == ()
