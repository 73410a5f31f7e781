"""Speeds for the autoscaler: of waiting trainers, late shards, and a trainer that was away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.trainer.rates import LEAST_STEPS, Rates


def stepping(*busy: float, first: float = 30.0) -> Rates:
    rates = Rates()
    for i, seconds in enumerate((first, *busy)):
        rates.stepped(seconds, now=float(i))
    return rates


def test_the_first_step_of_a_process_is_not_its_speed():
    assert stepping().steps_per_busy_second() is None
    assert stepping(2.0, 3.0).steps_per_busy_second() == pytest.approx(2 / 5)


def test_a_trainer_that_has_waited_for_long_keeps_the_speed_of_its_last_steps():
    rates = stepping(*[1.0] * 50)
    rates.stepped(3.0, now=10_000.0)
    assert rates.steps_per_busy_second() == pytest.approx(LEAST_STEPS / (LEAST_STEPS - 1 + 3.0))


def test_old_steps_leave_the_window():
    rates = stepping(*[1.0] * 5)
    for i in range(20):
        rates.stepped(0.5, now=1000.0 + i)
    assert rates.steps_per_busy_second() == pytest.approx(2.0)


def test_a_searcher_is_measured_from_its_first_shard_on_and_by_its_own_clock():
    rates = Rates()
    rates.delivered("a", 100, up_seconds=60.0, now=0.0)  # 60 s of loading a model are no part of its rate
    assert rates.trajectories_per_searcher_second(0.0) is None
    rates.delivered("a", 20, up_seconds=70.0, now=0.1)  # found at once by a trainer that was away
    assert rates.trajectories_per_searcher_second(1.0) == pytest.approx(2.0)


def test_the_rate_is_the_mean_of_the_searchers_heard_of_lately():
    rates = Rates()
    for name, rows, now in (("a", 10, 0.0), ("b", 30, 50.0)):
        rates.delivered(name, 1, up_seconds=0.0, now=now)
        rates.delivered(name, rows, up_seconds=10.0, now=now)
    assert rates.trajectories_per_searcher_second(55.0) == pytest.approx((1.0 + 3.0) / 2)
    assert rates.trajectories_per_searcher_second(70.0) == pytest.approx(3.0)
    assert rates.trajectories_per_searcher_second(200.0) is None


def test_what_a_searcher_did_minutes_ago_does_not_count():
    rates = Rates()
    for up in range(0, 1000, 10):
        rates.delivered("a", 100 if up < 500 else 10, up_seconds=float(up), now=float(up))
    assert rates.trajectories_per_searcher_second(1000.0) == pytest.approx(1.0)


@given(st.permutations(range(1, 20)))
def test_shards_in_any_order_lose_no_rows(order):
    rates = Rates()
    rates.delivered("a", 5, up_seconds=0.0, now=0.0)
    for i in order:
        rates.delivered("a", 5, up_seconds=5.0 * i, now=0.0)
    rates.delivered("a", 5, up_seconds=100.0, now=0.0)
    assert rates.trajectories_per_searcher_second(0.0) == pytest.approx(5 * 20 / 100)
