"""The autoscaler: by hand, and in a closed loop with noise, slow pods and changes of load."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scaling_run import (
    HEARD_SECONDS,
    ROWS,
    START,
    TICK_SECONDS,
    Load,
    ScalingRun,
    autoscaling,
    job,
    sample,
    settled_after,
    turns,
)

from tba_operator.scaling import UP_SECONDS, WARM_SECONDS, decide
from tba_operator.world import Average, ScalingMemory

HOUR = 3600.0
START_SECONDS = 300.0
RATE = 2.0

needs = st.floats(0.3, 60.0)
seeds = st.integers(0, 10_000)


def load_of(needed: float, *, storage: bool = True) -> Load:
    """The load for which `needed` searchers are exactly right."""
    return Load(needed * RATE / ROWS, RATE, storage)


def known(**changes) -> ScalingMemory:
    """The memory of a warm pool of 4 whose trainer needs 4."""
    values = {
        "started_from": 4,
        "desired": 4,
        "rate": Average(RATE, 100),
        "demand": Average(4 * RATE, 100),
        "recommendations": ((START - TICK_SECONDS, 4.0),),
        "last_sample": START - TICK_SECONDS,
        "pool": 4,
        "pool_since": START - HOUR,
    }
    return ScalingMemory(**{**values, **changes})


def decided(memory, found, *, policy=None, replicas=4, ready=4, status_desired=0, now=START) -> ScalingMemory:
    known_job = job(replicas=replicas, desired=status_desired)
    return decide(policy or autoscaling(), replicas, memory, found, job=known_job, ready=ready, now=now)


def fed(memory, count, *, every=TICK_SECONDS, policy=None, ready=4, **progress) -> ScalingMemory:
    """After `count` equal samples."""
    for i in range(1, count + 1):
        at = START + i * every
        memory = decided(memory, sample(at, **progress), policy=policy, ready=ready, now=at)
    return memory


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_number_is_demand_over_target_over_the_rate_of_a_searcher():
    # 0.5 steps a second × 8·16 rows = 64 rows a second; ÷ 2 = 32; a searcher makes 2: 16 searchers.
    policy = autoscaling(target_replay_ratio=2.0)
    memory = fed(known(demand=Average(), rate=Average()), 30, policy=policy, steps=0.5, rate=RATE, searchers=4)
    assert memory.desired == 16


def test_it_begins_at_the_replicas_of_the_spec():
    assert decided(None, None, replicas=7).desired == 7


def test_it_goes_on_from_the_status_after_a_restart_of_the_operator():
    assert decided(None, None, replicas=4, status_desired=11).desired == 11


def test_a_restart_does_not_scale_down_before_a_whole_window_was_seen():
    memory = decided(None, None, replicas=4, status_desired=40)
    for i in range(29):
        at = START + i * TICK_SECONDS
        memory = decided(memory, sample(at, steps=1 / 64, rate=RATE, searchers=40), ready=40, now=at)
        assert memory.desired == 40


def test_a_change_of_the_spec_begins_there_and_keeps_what_was_learnt():
    memory = decided(known(started_from=4, desired=9), None, replicas=6)
    assert (memory.desired, memory.started_from, memory.rate.value) == (6, 6, RATE)


def test_no_sample_holds():
    memory = known(desired=9)
    assert decided(memory, None) == memory


def test_a_sample_without_numbers_holds():
    assert fed(known(desired=9, rate=Average(), demand=Average()), 60, steps=None, rate=None, searchers=4).desired == 9


def test_a_rate_of_nothing_is_no_rate():
    assert fed(known(rate=Average()), 60, steps=1.0, rate=0.0, searchers=4).rate.value is None


def test_steps_of_nothing_are_no_demand():
    assert fed(known(demand=Average()), 60, steps=0.0, rate=RATE, searchers=4).demand.value is None


def test_a_rate_without_a_demand_holds():
    memory = fed(known(desired=9, demand=Average()), 60, steps=None, rate=RATE, searchers=4)
    assert (memory.rate.value, memory.desired) == (pytest.approx(RATE), 9)


def test_a_sample_is_used_once():
    found = sample(START, steps=1.0, rate=RATE, searchers=4)
    once = decided(known(), found)
    assert decided(once, found, now=START + HOUR) == once


def test_a_change_of_the_bounds_holds_at_once():
    assert decided(known(desired=9), None, policy=autoscaling(max_replicas=5)).desired == 5
    assert decided(known(desired=9), None, policy=autoscaling(min_replicas=12)).desired == 12


def test_replicas_of_nought_are_lifted_to_one():
    assert decided(None, None, replicas=0).desired == 1


def test_a_need_within_the_dead_band_changes_nothing():
    enough = 4.3 * RATE / ROWS
    assert fed(known(), 100, steps=enough, rate=RATE, searchers=4).desired == 4


def test_one_high_sample_does_not_scale_up():
    assert decided(known(), sample(START, steps=1.0, rate=RATE, searchers=4)).desired == 4


def test_samples_that_come_rarely_still_scale_up_and_need_two():
    every = 3 * UP_SECONDS
    assert fed(known(), 1, every=every, steps=1.0, rate=RATE, searchers=4).desired == 4
    assert fed(known(), 3, every=every, steps=1.0, rate=RATE, searchers=4).desired > 30


def test_pods_that_are_still_starting_are_not_asked_for_again():
    memory = fed(known(), 60, steps=8 * RATE / ROWS, rate=RATE, searchers=4)  # 4 of 8 never come
    assert memory.desired == 8


def test_the_rate_of_a_pool_that_has_just_grown_is_not_taken():
    memory = fed(known(), 5, ready=8, steps=4 * RATE / ROWS, rate=RATE / 2, searchers=8)
    assert memory.rate.value == RATE


def test_the_rate_is_taken_once_the_pool_is_warm():
    count = int(WARM_SECONDS / TICK_SECONDS) + 60
    memory = fed(known(), count, ready=8, steps=4 * RATE / ROWS, rate=RATE / 2, searchers=8)
    assert memory.rate.value == pytest.approx(RATE / 2, rel=0.01)


def test_a_few_that_come_and_go_do_not_keep_a_pool_cold():
    grown = START - WARM_SECONDS / 2
    memory = known(pool=10, pool_since=grown)
    for at, searchers in ((START, 6), (START + 20, 10)):
        memory = decided(memory, sample(at, searchers=searchers), ready=10, now=at)
    assert (memory.pool, memory.pool_since) == (10, grown)


def test_a_warm_pool_that_shrank_is_cold_again_when_it_grows_back():
    memory = known(pool=10)
    for at, searchers in ((START, 6), (START + 20, 10)):
        memory = decided(memory, sample(at, searchers=searchers), ready=10, now=at)
    assert (memory.pool, memory.pool_since) == (10, START + 20)


def test_the_rate_is_not_taken_while_restarted_searchers_count_twice():
    memory = fed(known(pool=6), 5, ready=4, steps=4 * RATE / ROWS, rate=RATE / 2, searchers=6)
    assert memory.rate.value == RATE


def test_a_storage_outage_teaches_nothing():
    memory = fed(known(), 60, state="WaitingForStorage", steps=0.001, rate=0.01, searchers=4)
    assert (memory.rate.value, memory.demand.value, memory.desired) == (RATE, 4 * RATE, 4)


def test_a_change_of_the_target_waits_for_the_end_of_a_storage_outage():
    policy = autoscaling(target_replay_ratio=0.25)
    assert fed(known(), 60, policy=policy, state="WaitingForStorage", searchers=4).desired == 4
    assert fed(known(), 60, policy=policy, steps=4 * RATE / ROWS, rate=RATE, searchers=4).desired == 16


def test_the_backlog_after_a_storage_outage_is_no_rate():
    memory = fed(known(), 1, state="WaitingForStorage", searchers=4)
    memory = decided(memory, sample(START + 20, steps=4 * RATE / ROWS, rate=50 * RATE, searchers=4), now=START + 20)
    assert memory.rate.value == RATE


def test_memory_stays_as_long_as_the_window():
    memory = fed(known(), 500, policy=autoscaling(stabilization_seconds=300), steps=0.05, rate=RATE, searchers=4)
    assert len(memory.recommendations) <= 300 / TICK_SECONDS + 1


# ── in a closed loop ─────────────────────────────────────────────────────────────────────────────────────────────────


def run_of(load, seconds, **options) -> ScalingRun:
    policy = options.pop("policy", autoscaling())
    return ScalingRun(load, policy, start_seconds=START_SECONDS, **options).run(seconds)


def usual_settling(load, seconds, needed, *, seed, since=0.0, **options) -> float:
    """Seconds from `since`, in the middle one of five runs with noise of their own: one noise in some hundred keeps a
    pool that is just outside the band there for longer. Every one settles."""
    found = [run_of(load, seconds, noise=0.2, seed=seed + i, **options) for i in range(5)]
    settled = [settled_after(run.desired[int(since / TICK_SECONDS) :], needed) for run in found]
    assert None not in settled
    return statistics.median(s for s in settled if s is not None)


@settings(max_examples=25, deadline=None)
@given(needed=needs, replicas=st.integers(1, 64), seed=seeds)
def test_it_settles_from_any_start_within_two_start_times_of_the_first_rows(needed, replicas, seed):
    after = usual_settling(lambda _: load_of(needed), HOUR, needed, replicas=replicas, seed=seed)
    assert after <= START_SECONDS + 2 * START_SECONDS


@settings(max_examples=25, deadline=None)
@given(before=st.floats(1.0, 30.0), factor=st.floats(0.1, 10.0), seed=seeds)
def test_it_follows_a_tenfold_change_of_load_within_two_start_times(before, factor, seed):
    after = min(before * factor, 60.0)
    load = lambda at: load_of(before if at <= HOUR else after)  # noqa: E731
    assert usual_settling(load, 2 * HOUR, after, since=HOUR, replicas=8, seed=seed) <= 2 * START_SECONDS


@settings(max_examples=15, deadline=None)
@given(slower=st.floats(0.3, 3.0), seed=seeds)
def test_it_follows_searchers_that_become_slower_or_faster(slower, seed):
    steps = 10 * RATE / ROWS
    load = lambda at: Load(steps, RATE if at <= HOUR else RATE / slower)  # noqa: E731
    assert usual_settling(load, 2 * HOUR, 10 * slower, since=HOUR, replicas=10, seed=seed) <= 2 * START_SECONDS


@settings(max_examples=15, deadline=None)
@given(needed=needs, seed=seeds)
def test_noise_makes_no_limit_cycle(needed, seed):
    found = run_of(lambda _: load_of(needed), 5 * HOUR, replicas=4, noise=0.2, seed=seed)
    late = found.desired[int(HOUR / TICK_SECONDS) :]
    assert turns(late) <= 3  # in four hours
    assert max(late) - min(late) <= max(1.0, 0.25 * needed)


@settings(max_examples=10, deadline=None)
@given(needed=needs, replicas=st.integers(1, 64))
def test_without_noise_it_stands_still(needed, replicas):
    found = run_of(lambda _: load_of(needed), 3 * HOUR, replicas=replicas)
    assert len(set(found.desired[int(HOUR / TICK_SECONDS) :])) == 1
    assert turns(found.desired) == 0


@settings(max_examples=15, deadline=None)
@given(
    low=st.integers(1, 6),
    width=st.integers(0, 10),
    before=st.floats(0.01, 200),
    after=st.floats(0.01, 200),
    replicas=st.integers(0, 100),
    seed=seeds,
)
def test_it_never_leaves_the_bounds(low, width, before, after, replicas, seed):
    policy = autoscaling(min_replicas=low, max_replicas=low + width)
    load = lambda at: load_of(before if at <= HOUR else after)  # noqa: E731
    found = run_of(load, 2 * HOUR, policy=policy, replicas=replicas, noise=0.2, seed=seed)
    assert low <= min(found.desired)
    assert max(found.desired) <= low + width


@settings(max_examples=10, deadline=None)
@given(needed=st.floats(2.0, 50.0), at=st.integers(120, 300), seed=seeds)
def test_an_operator_that_restarts_keeps_the_number(needed, at, seed):
    moment = at * TICK_SECONDS
    found = run_of(lambda _: load_of(needed), 2 * HOUR, replicas=1, noise=0.2, seed=seed, restarts=frozenset({moment}))
    assert found.desired[at - 1] == found.desired[at - 2]
    assert turns(found.desired[at - 6 :]) <= 2


@settings(max_examples=10, deadline=None)
@given(seconds=st.sampled_from([60.0, 600.0, 1800.0]), seed=seeds)
def test_a_storage_outage_moves_nothing(seconds, seed):
    load = lambda at: load_of(12.0, storage=not HOUR < at <= HOUR + seconds)  # noqa: E731
    found = run_of(load, 3 * HOUR, replicas=12, noise=0.2, seed=seed)
    assert min(found.desired) >= 11
    assert max(found.desired) <= 15


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_lost_pods_do_not_make_it_ask_for_more(seed):
    losses = {HOUR + i * 600: 3 for i in range(6)}
    found = run_of(lambda _: load_of(12.0), 3 * HOUR, replicas=12, noise=0.2, seed=seed, losses=losses)
    assert max(found.desired) <= 15


def test_a_pool_that_grows_from_one_to_many_does_not_overshoot():
    found = run_of(lambda _: load_of(32.0), HOUR, replicas=1)
    assert max(found.desired) == 32
    assert HEARD_SECONDS < WARM_SECONDS


def test_the_target_holds_live():
    memory = known(demand=Average(8 * RATE, 100))
    doubled = fed(
        memory, 60, policy=autoscaling(target_replay_ratio=2.0), steps=8 * RATE / ROWS, rate=RATE, searchers=4
    )
    assert doubled.desired == 4
    assert doubled.demand.value == pytest.approx(8 * RATE)
