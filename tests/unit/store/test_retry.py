from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts.errors import StoreUnavailable
from tba.store.protocol import NotFound
from tba.store.retry import Retrier, RetryPolicy, Transient


class FakeTime:
    """A clock that only sleeping and slow attempts move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def make(policy: RetryPolicy, *, uniform=lambda: 1.0, observe=None) -> tuple[Retrier, FakeTime]:
    time = FakeTime()
    return Retrier(policy, clock=time.clock, sleep=time.sleep, uniform=uniform, observe=observe), time


def failing(times: int, result: str = "done"):
    left = [times]

    def attempt() -> str:
        if left[0]:
            left[0] -= 1
            raise Transient("503")
        return result

    return attempt


def test_waits_double_up_to_the_cap():
    retrier, time = make(RetryPolicy(base_delay_seconds=1, max_delay_seconds=5, budget_seconds=100))
    assert retrier.call("get", "k", failing(5)) == "done"
    assert time.slept == [1, 2, 4, 5, 5]


def test_jitter_scales_the_whole_wait():
    retrier, time = make(RetryPolicy(base_delay_seconds=1, max_delay_seconds=5), uniform=lambda: 0.0)
    retrier.call("get", "k", failing(5))
    assert time.slept == [0.0] * 5


def test_the_last_of_the_attempts_ends_the_call():
    retrier, time = make(RetryPolicy(max_attempts=3, base_delay_seconds=1))
    with pytest.raises(StoreUnavailable, match=r"get k in 3 attempts .*last error: 503.*check"):
        retrier.call("get", "k", failing(3))
    assert len(time.slept) == 2


def test_an_answer_is_not_tried_again():
    retrier, time = make(RetryPolicy())

    def attempt() -> None:
        raise NotFound("k")

    with pytest.raises(NotFound):
        retrier.call("get", "k", attempt)
    assert time.slept == []


def test_every_attempt_is_observed():
    seen: Counter[tuple[str, str]] = Counter()
    retrier, _ = make(RetryPolicy(max_attempts=2), observe=lambda op, outcome: seen.update([(op, outcome)]))
    retrier.call("get", "k", failing(1))
    with pytest.raises(StoreUnavailable):
        retrier.call("put_once", "k", failing(9))
    assert seen == {
        ("get", "retried"): 1,
        ("get", "ok"): 1,
        ("put_once", "retried"): 2,
        ("put_once", "unavailable"): 1,
    }


@given(
    budget=st.floats(0, 300),
    cap=st.floats(0.1, 60),
    base=st.floats(0.01, 10),
    attempts=st.integers(1, 3000),
    jitter=st.lists(st.floats(0, 0.999), min_size=1, max_size=20),
    slowness=st.floats(0.001, 10),
)
def test_no_wait_begins_that_would_end_beyond_the_budget(budget, cap, base, attempts, jitter, slowness):
    policy = RetryPolicy(budget_seconds=budget, max_attempts=attempts, base_delay_seconds=base, max_delay_seconds=cap)
    draws = iter(jitter * 3000)
    retrier, time = make(policy, uniform=lambda: next(draws))

    def attempt() -> None:
        time.now += slowness
        raise Transient("down")

    with pytest.raises(StoreUnavailable):
        retrier.call("get", "k", attempt)
    assert time.now <= budget + slowness + 1e-6
    assert len(time.slept) < attempts
    assert all(0 <= seconds <= cap for seconds in time.slept)


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"budget_seconds": -1}, {"request_timeout_seconds": 0}])
def test_a_policy_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError):
        RetryPolicy(**wrong)
