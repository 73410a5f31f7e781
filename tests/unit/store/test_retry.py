from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts.errors import StoreUnavailable, UserError
from tba.store.protocol import AccessDenied, NotFound
from tba.store.retry import Retrier, RetryPolicy, Rotation, Transient, Wait, Weather, WrongIdentity


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


def test_a_store_that_never_answered_has_a_budget_of_its_own_and_later_the_whole_one():
    retrier, time = make(RetryPolicy(budget_seconds=60, first_budget_seconds=5, base_delay_seconds=1))
    with pytest.raises(StoreUnavailable, match=r"budget 5 s"):
        retrier.call("get", "k", failing(99))
    assert time.now <= 5
    retrier.call("get", "k", lambda: "ok")
    since = time.now
    with pytest.raises(StoreUnavailable, match=r"budget 60 s"):
        retrier.call("get", "k", failing(99))
    assert 30 < time.now - since <= 60


def test_every_wait_is_told_with_its_cause_its_place_and_what_is_left():
    time, told = FakeTime(), []
    policy = RetryPolicy(base_delay_seconds=1, budget_seconds=10)
    retrier = Retrier(
        policy, clock=time.clock, sleep=time.sleep, uniform=lambda: 1.0, place=lambda: "http://s3", on_wait=told.append
    )

    def refused() -> None:
        raise Transient("GET http://s3/k: Connection refused", "Connection refused")

    with pytest.raises(StoreUnavailable, match=r"check that http://s3 is up"):
        retrier.call("get", "k", refused)
    assert told == [Wait("http://s3", "Connection refused", s, left) for s, left in [(1, 10), (3, 9), (7, 7)]]


def test_a_rotation_is_told_with_its_own_patience():
    told: list[Wait] = []
    time = FakeTime()
    retrier = Retrier(
        RetryPolicy(base_delay_seconds=1), clock=time.clock, sleep=time.sleep, rotation=ROTATION, on_wait=told.append
    )
    assert retrier.call("get", "k", unknown(0.5, time)) == "done"
    assert "InvalidAccessKeyId" in told[0].cause and told[0].left_seconds == ROTATION.first_seconds


WRONG = [{"max_attempts": 0}, {"budget_seconds": -1}, {"first_budget_seconds": -1}, {"request_timeout_seconds": 0}]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_policy_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError):
        RetryPolicy(**wrong)


ROTATION = Rotation(first_seconds=20.0, later_seconds=300.0, where="the Secret")


def unknown(until: float, time: FakeTime):
    """A server that does not know our keys before that time."""

    def attempt() -> str:
        if time.now < until:
            raise WrongIdentity("server answered 403 InvalidAccessKeyId")
        return "done"

    return attempt


def rotating(rotation: Rotation = ROTATION) -> tuple[Retrier, FakeTime]:
    time = FakeTime()
    policy = RetryPolicy(base_delay_seconds=1, max_delay_seconds=5, budget_seconds=10, max_attempts=3)
    return Retrier(policy, clock=time.clock, sleep=time.sleep, uniform=lambda: 1.0, rotation=rotation), time


def test_keys_that_never_change_are_refused_at_once():
    retrier, time = rotating(Rotation())
    for _ in range(2):
        with pytest.raises(UserError, match="InvalidAccessKeyId") as caught:
            retrier.call("get", "k", unknown(1, time))
        assert time.slept == [] and not isinstance(caught.value, AccessDenied)
        retrier.call("get", "k", lambda: "ok")


def test_a_wrong_key_from_the_start_ends_soon_and_names_where_it_comes_from():
    retrier, time = rotating()
    with pytest.raises(UserError, match="InvalidAccessKeyId; the keys come from the Secret") as caught:
        retrier.call("get", "k", unknown(1e9, time))
    assert not isinstance(caught.value, AccessDenied), "a waiting searcher would take that for `not yet`"
    assert 10 < time.now < 60


def test_a_new_key_that_the_server_learns_of_late_is_no_mistake():
    retrier, time = rotating()
    assert retrier.call("get", "k", unknown(8, time)) == "done"


@pytest.mark.parametrize("first", [lambda: "ok", lambda: raise_(NotFound("k")), lambda: raise_(AccessDenied("k"))])
def test_a_rotation_is_sat_out_for_minutes_once_the_keys_were_known(first):
    retrier, time = rotating()
    with suppress(NotFound, AccessDenied):
        retrier.call("get", "k", first)
    assert retrier.call("get", "k", unknown(200, time)) == "done"


def test_a_rotation_that_never_ends_is_denied_access():
    retrier, time = rotating()
    retrier.call("get", "k", lambda: "ok")
    with pytest.raises(AccessDenied):
        retrier.call("get", "k", unknown(1e9, time))
    assert 250 < time.now < 360


def test_the_servers_clock_says_nothing_about_our_keys():
    retrier, time = rotating()
    retrier.call("now", "", lambda: 1.0)
    with pytest.raises(UserError):
        retrier.call("get", "k", unknown(60, time))


def test_weather_knows_since_when_requests_fail_and_clears_with_any_answer():
    now = [100.0]
    weather = Weather(clock=lambda: now[0])
    time = FakeTime()
    retrier = Retrier(RetryPolicy(max_attempts=2), clock=time.clock, sleep=time.sleep, weather=weather)
    with pytest.raises(StoreUnavailable):
        retrier.call("get", "k", failing(9))
    now[0] = 150.0
    with pytest.raises(StoreUnavailable):
        retrier.call("get", "k", failing(9))
    assert weather.trouble == (100.0, "503")
    with pytest.raises(NotFound):
        retrier.call("get", "k", lambda: raise_(NotFound("k")))
    assert weather.trouble is None


def raise_(error: Exception):
    raise error
