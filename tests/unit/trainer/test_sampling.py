import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plausibility import is_plausible, ks_2samp
from unit.trainer.shard_rows import R, V, new_rows

from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.records import ShardId
from tba.trainer.buffer import NewRows, ReplayBuffer
from tba.trainer.sampling import BatchPlan, Ready, Sampler, SamplingSettings, Waiting


def conditions(num_prompts: int = 2, size: int = 4, k: int = 2, **options: object) -> SamplingSettings:
    return SamplingSettings(num_prompts, size, k, **options)


def visit(number: int, prompt: int, *, version: int = 0, num_rows: int = 6, rewards: list[float] | None = None) -> V:
    """Distinct responses."""
    values = rewards or [0.0] * num_rows
    return V(number, prompt, [R([number, i], reward, version) for i, reward in enumerate(values)])


def filled(*visits: V, **options: object) -> ReplayBuffer:
    buffer = ReplayBuffer(**{"capacity_per_prompt": 100, **options})
    for seq, v in enumerate(visits):
        buffer.add(new_rows(seq, v))
    return buffer


def drawn_visits(buffer: ReplayBuffer, plan: BatchPlan) -> list[set[int]]:
    """By slot: first tokens of its rows, which `visit` makes the visit number."""
    return [{int(buffer.tokens(int(row))[0]) for row in group} for group in plan.rows]


# -- one batch by hand


def test_repeats_of_a_row_are_merged_into_the_weight_of_its_first_place() -> None:
    buffer = filled(V(0, 3, [R([1], 1.0), R([1], 1.0), R([2]), R([1], 1.0)]))
    plan = Sampler(0).sample(buffer, 2, conditions(1, 4, on_policy_probability=1.0))
    one = {int(r) for r in buffer.members(0, 0) if buffer.tokens(int(r)).tolist() == [1]}.pop()
    group = plan.rows[0].tolist()
    assert Counter(group)[one] == 3
    expected = [0.0] * 4
    expected[group.index(one)] = 3.0
    expected[next(i for i, r in enumerate(group) if r != one)] = 1.0
    assert plan.weights[0].tolist() == expected
    assert (plan.prompt_ids.tolist(), plan.replay.tolist(), plan.with_replacement.tolist()) == ([3], [False], [False])
    assert plan.staleness.tolist() == [[2, 2, 2, 2]]


def test_a_visit_with_fewer_than_k_rows_is_drawn_with_replacement_and_says_so() -> None:
    buffer = filled(visit(0, 0, num_rows=3))
    plan = Sampler(0).sample(buffer, 0, conditions(1, 8, on_policy_probability=1.0))
    assert plan.with_replacement.tolist() == [True]
    assert plan.weights.sum() == 8
    assert set(plan.rows[0].tolist()) <= set(buffer.members(0, 0).tolist())


@pytest.mark.parametrize("num_rows", [5, 7])
def test_a_visit_with_k_rows_or_more_is_drawn_without_replacement(num_rows: int) -> None:
    buffer = filled(visit(0, 0, num_rows=num_rows))
    for seed in range(5):
        plan = Sampler(seed).sample(buffer, 0, conditions(1, 5, on_policy_probability=1.0))
        assert len(set(plan.rows[0].tolist())) == 5 and plan.weights[0].tolist() == [1.0] * 5
        assert plan.with_replacement.tolist() == [False]


@given(seed=st.integers(0, 1000), copies=st.lists(st.integers(1, 5), min_size=2, max_size=6), m=st.sampled_from([0, 1]))
@settings(max_examples=40, deadline=None)
def test_weights_of_each_group_count_its_draws(seed: int, copies: list[int], m: int) -> None:
    rows = [R([i]) for i, n in enumerate(copies) for _ in range(n)]
    buffer = filled(V(0, 0, rows), V(1, 1, rows))
    plan = Sampler(seed).sample(buffer, 0, conditions(2, 5, on_policy_probability=float(m)))
    for group, weights in zip(plan.rows.tolist(), plan.weights.tolist(), strict=True):
        assert sum(weights) == 5
        assert {r: w for r, w in zip(group, weights, strict=True) if w > 0} == Counter(group)


# -- the most-on-policy branch


def pool_of(sampler: Sampler, buffer: ReplayBuffer, steps: int = 30) -> Counter[int]:
    """Visits drawn by the most-on-policy branch, P 2, K 4, k 2: the pool holds at least 4 prompts."""
    seen = Counter()
    for _ in range(steps):
        plan = sampler.sample(buffer, 20, conditions(2, 4, 2, on_policy_probability=1.0))
        seen.update(n for numbers in drawn_visits(buffer, plan) for n in numbers)
    return seen


def test_the_pool_is_the_newest_arrival_that_covers_k_times_p_prompts() -> None:
    buffer, sampler = filled(*(visit(n, n) for n in range(8))), Sampler(0)
    assert set(pool_of(sampler, buffer, 1)) < set(range(8))
    for n in range(8, 14):
        buffer.add(new_rows(n, visit(n, n)))
    seen = pool_of(sampler, buffer)
    assert set(seen) == {8, 9, 10, 11, 12, 13}
    assert set(seen.values()) == {10}  # each once a pass


def test_an_arrival_is_in_the_pool_whole_or_not_at_all() -> None:
    buffer, sampler = filled(*(visit(n, n) for n in range(20))), Sampler(0)
    pool_of(sampler, buffer, 1)
    for n in range(20, 27):
        buffer.add(new_rows(n, visit(n, n)))
    pool_of(sampler, buffer, 1)
    for n in range(27, 30):  # too few on their own: the arrival before joins them, the first one does not
        buffer.add(new_rows(n, visit(n, n)))
    assert set(pool_of(sampler, buffer)) == set(range(20, 30))


def test_waiting_between_arrivals_does_not_split_them() -> None:
    asked, silent = Sampler(0), Sampler(0)
    buffer = filled(*(visit(n, n) for n in range(4)))
    pools = []
    for sampler in (asked, silent):
        pool_of(sampler, buffer, 1)
    for n in range(4, 12):
        buffer.add(new_rows(n, visit(n, n)))
        asked.readiness(buffer, 20, conditions(2, 4, 2, on_policy_probability=1.0))
    pools = [pool_of(sampler, buffer) for sampler in (asked, silent)]
    assert pools[0] == pools[1] and set(pools[0]) == set(range(4, 12))


def steady_pools(before: SamplingSettings, after: SamplingSettings, steps: int = 30) -> list[set[int]]:
    """Visits of the pool at each of the last steps, under `after`: two visits complete a step, number 2 step, + 1."""
    buffer, sampler, pools = filled(), Sampler(0), []
    for step in range(2 * steps):
        settings_ = before if step < steps else after
        for n in (2 * step, 2 * step + 1):
            buffer.add(new_rows(n, visit(n, n)))
        if settings_.ingest == "AtSync" and step % 2 == 0:
            sampler.on_sync(buffer)
        sampler.sample(buffer, step, settings_)
        pools.append({number for _, number in sampler._mop_pool(buffer, step, settings_)})
    return pools[steps:]


def test_a_pool_that_a_live_change_makes_larger_holds_the_newest_prompts_and_not_all_there_are() -> None:
    k_2, k_10 = (conditions(2, 4, k, on_policy_probability=1.0) for k in (2, 10))
    for i, pool in enumerate(steady_pools(k_2, k_10)):
        newest = 2 * (30 + i) + 1
        assert pool == set(range(newest - len(pool) + 1, newest + 1))
        assert 20 <= len(pool) <= 22


def test_a_live_change_between_the_ways_of_ingest_keeps_the_pool_to_what_is_new() -> None:
    continuous, at_sync = (
        conditions(2, 4, 2, on_policy_probability=1.0, ingest=ingest) for ingest in ("Continuous", "AtSync")
    )
    for before, after in ((continuous, at_sync), (at_sync, continuous)):
        assert max(map(len, steady_pools(before, after))) <= 6


def test_a_run_that_only_replays_keeps_no_record_of_arrivals() -> None:
    buffer, sampler = filled(visit(0, 0), visit(1, 1)), Sampler(0)
    sizes = set()
    for n in range(2, 20):
        buffer.add(new_rows(n, visit(n, n)))
        sampler.sample(buffer, 0, conditions(2, 4, on_policy_probability=0.0))
        sizes.add(len(sampler.state()["arrivals"]))
    assert len(sizes) == 1


def test_newest_means_last_completed_whatever_the_policy() -> None:
    buffer = filled(visit(0, 0, version=9), visit(1, 1, version=3), visit(2, 2, version=3), visit(3, 3, version=1))
    pool = buffer.prompts.newest_visits(4, 0)
    assert buffer.prompts.ids(np.array(pool)[:, 0]).tolist() == [3, 2, 1, 0]
    assert buffer.prompts.newest_visits(9, 3) == pool[1:]
    assert buffer.prompts.newest_visits(2, 3) == pool[1:3]


def test_an_exhausted_pool_is_recycled_and_counted() -> None:
    buffer = filled(*(visit(n, n) for n in range(4)))
    sampler, settings_ = Sampler(0), conditions(2, 4, 2, on_policy_probability=1.0)
    counts = []
    for _ in range(5):
        plan = sampler.sample(buffer, 0, settings_)
        assert len(set(plan.prompt_ids.tolist())) == 2
        counts.append(plan.mop_recycles)
    assert counts == [0, 0, 1, 1, 2]


def test_a_visit_that_arrives_in_mid_pass_is_drawn_before_others_come_again() -> None:
    buffer = filled(*(visit(n, n) for n in range(4)))
    sampler, settings_ = Sampler(3), conditions(2, 4, 2, on_policy_probability=1.0)
    first = [sampler.sample(buffer, 0, settings_) for _ in range(2)]
    assert {n for plan in first for s in drawn_visits(buffer, plan) for n in s} == {0, 1, 2, 3}
    buffer.add(new_rows(9, visit(9, 9, version=1)))
    plan = sampler.sample(buffer, 1, settings_)
    assert {9} in drawn_visits(buffer, plan)
    assert plan.mop_recycles == 1  # only one visit was fresh


def test_branch_frequency_lies_in_its_confidence_interval() -> None:
    buffer = filled(*(visit(n, n) for n in range(30)))
    sampler, slots = Sampler(5), 0
    mop = 0
    for _ in range(250):
        plan = sampler.sample(buffer, 0, conditions(20, 2, on_policy_probability=0.7))
        mop, slots = mop + int((~plan.replay).sum()), slots + 20
    assert is_plausible(mop, slots, 0.7, confidence=0.999)


def test_the_branch_is_chosen_for_each_slot_not_for_the_batch() -> None:
    buffer = filled(*(visit(n, n) for n in range(8)))
    sampler = Sampler(1)
    settings_ = conditions(8, 2, on_policy_probability=0.5)
    replay = [sampler.sample(buffer, 0, settings_).replay.sum() for _ in range(200)]
    few, many = np.mean(np.array(replay) < 3), np.mean(np.array(replay) > 5)  # each 37 of 256 by the binomial law
    assert 0.07 < few < 0.24
    assert 0.07 < many < 0.24


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_a_branch_of_probability_zero_is_never_used_even_if_the_other_has_nothing(m: float) -> None:
    buffer = filled(*(visit(n, n, version=n) for n in range(4)))
    plan = Sampler(0).sample(buffer, 4, conditions(4, 4, on_policy_probability=m))
    assert plan.replay.tolist() == [m == 0] * 4
    lags = {"max_policy_lag": 0} if m == 1 else {"max_replay_lag": 0}
    state = Sampler(0).readiness(buffer, 4, conditions(4, 4, on_policy_probability=m, **lags))
    assert isinstance(state, Waiting)
    assert next(iter(lags)).split("_")[1].capitalize() in state.reason


def test_a_slot_whose_branch_has_nothing_eligible_takes_the_other() -> None:
    buffer = filled(*(visit(n, n, version=n) for n in range(4)))
    only_replay = conditions(4, 4, on_policy_probability=0.9, max_policy_lag=0)
    assert Sampler(0).sample(buffer, 10, only_replay).replay.all()
    only_mop = conditions(4, 4, on_policy_probability=0.1, max_replay_lag=0)
    assert not Sampler(0).sample(buffer, 10, only_mop).replay.any()


def test_paper_semantics_give_a_lag_of_k_to_2k_minus_1() -> None:
    for k, mean in ((1, 1.0), (2, 2.5), (10, 14.5)):
        buffer, sampler, rng = filled(capacity_per_prompt=100), Sampler(0), np.random.default_rng(0)
        settings_ = conditions(3, 4, k, ingest="AtSync", on_policy_probability=1.0)
        lags, held = Counter(), [visit(n, int(n), version=0) for n in range(6)]
        for step in range(20 * k):
            if step % k == 0:  # sync: what was made with the weights of the sync before becomes the pool
                for v in held:
                    buffer.add(new_rows(v.visit, v))
                sampler.on_sync(buffer)
                prompts = rng.choice(40, 6, replace=False)
                held = [visit(1000 * step + i + 10, int(p), version=step) for i, p in enumerate(prompts)]
            plan = sampler.sample(buffer, step, settings_)
            if step >= k:
                lags.update(plan.staleness.ravel().tolist())
        assert set(lags) == set(range(k, 2 * k))
        assert np.average(list(lags), weights=list(lags.values())) == mean


def test_the_previous_pool_stays_while_a_sync_brings_no_complete_visit() -> None:
    buffer, sampler = filled(visit(0, 0), visit(1, 1)), Sampler(0)
    settings_ = conditions(2, 4, 2, ingest="AtSync", on_policy_probability=1.0)
    sampler.on_sync(buffer)
    buffer.add(new_rows(5, V(2, 2, [R([2, 0])], size=2)))
    sampler.on_sync(buffer)
    assert sampler.sample(buffer, 2, settings_).prompt_ids.tolist() in ([0, 1], [1, 0])
    buffer.add(new_rows(6, V(2, 2, [R([2, 1])], size=2)))
    assert set(sampler.sample(buffer, 2, settings_).prompt_ids.tolist()) == {0, 1}  # not before the next sync
    sampler.on_sync(buffer)
    assert sampler.sample(buffer, 2, settings_).prompt_ids.tolist() == [2, 2]


def test_visits_that_trickle_in_during_a_wait_join_the_pool_of_the_sync() -> None:
    buffer, sampler = filled(visit(0, 0)), Sampler(0)
    settings_ = conditions(3, 4, 2, ingest="AtSync", on_policy_probability=1.0)
    sampler.on_sync(buffer)
    for n, extend in ((1, False), (2, True), (3, True)):
        buffer.add(new_rows(n, visit(n, n)))
        sampler.on_sync(buffer, extend=extend)
    assert set(sampler.sample(buffer, 2, settings_).prompt_ids.tolist()) == {1, 2, 3}


# -- the replay branch


def test_the_bag_gives_each_prompt_once_before_any_twice() -> None:
    buffer = filled(*(visit(n, n) for n in range(12)))
    sampler = Sampler(0)
    plans = [sampler.sample(buffer, 0, conditions(4, 4, on_policy_probability=0.0)) for _ in range(9)]
    prompts = np.concatenate([plan.prompt_ids for plan in plans]).reshape(3, 12)
    assert [sorted(p) for p in prompts.tolist()] == [list(range(12))] * 3
    assert prompts[0].tolist() != prompts[1].tolist()


def test_replay_draws_distinct_responses_of_all_visits() -> None:
    buffer = filled(visit(0, 0, num_rows=4), visit(1, 0, num_rows=4))
    sampler, seen = Sampler(0), set()
    for _ in range(30):
        plan = sampler.sample(buffer, 0, conditions(1, 4, on_policy_probability=0.0, sampling="Uniform"))
        assert len(set(plan.rows[0].tolist())) == 4
        seen |= set(plan.rows[0].tolist())
    assert len(seen) == 8


def shares(settings_: SamplingSettings, buffer: ReplayBuffer, step: int = 0, draws: int = 4000) -> np.ndarray:
    """Share of first draws of each of a prompt's rows, in order of arrival."""
    sampler, counts = Sampler(1), Counter()
    for _ in range(draws // settings_.prompts_per_batch):
        counts.update(sampler.sample(buffer, step, settings_).rows[:, 0].tolist())
    return np.array([counts[int(r)] for r in buffer.members(0, 0)]) / counts.total()


@pytest.mark.parametrize("size", [2, 8])  # without and with replacement
def test_priorities_of_the_replay_branch(size: int) -> None:
    rows = [R([0], 0.0, 0), R([1], 1.0, 1), R([2], 2.0, 1), R([3], 0.0, 3)]
    buffer = filled(V(0, 0, rows))
    rewards, versions = np.array([0.0, 1, 2, 0]), np.array([0, 1, 1, 3])

    def softmax(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum()

    for kind, expected in (
        ("Uniform", np.full(4, 0.25)),
        ("Reward", softmax(0.5 * rewards)),
        ("Recency", softmax(0.5 * versions)),
    ):
        settings_ = conditions(50, size, on_policy_probability=0.0, sampling=kind, inverse_temperature=0.5)
        buffer.complete_visits = 50  # a batch of 50 slots of the one prompt
        found = shares(settings_, buffer, step=3)
        assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / 4000), kind


def test_huge_rewards_do_not_overflow() -> None:
    buffer = filled(V(0, 0, [R([0], 1e30), R([1], -1e30), R([2], 0.0)]))
    for size in (2, 9):
        plan = Sampler(0).sample(buffer, 0, conditions(1, size, on_policy_probability=0.0))
        assert buffer.tokens(int(plan.rows[0, 0])).tolist() == [0]


# -- lag, whatever comes


steps_of_data = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 6), min_size=1, max_size=4)), max_size=3), max_size=12
)


@given(
    data=steps_of_data, policy_lag=st.none() | st.integers(0, 4), replay_lag=st.none() | st.integers(0, 4),
    m=st.sampled_from([0.0, 0.5, 1.0]), ingest=st.sampled_from(["Continuous", "AtSync"]), limit=st.none() | st.just(5),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_no_row_beyond_the_bound_of_its_branch_is_ever_sampled(
    data: list, policy_lag: int | None, replay_lag: int | None, m: float, ingest: str, limit: int | None
) -> None:
    buffer, sampler = ReplayBuffer(capacity_per_prompt=4, max_trajectories=limit), Sampler(0)
    settings_ = conditions(
        1, 3, 2, on_policy_probability=m, max_policy_lag=policy_lag, max_replay_lag=replay_lag, ingest=ingest
    )
    number = 0
    for step, arrivals in enumerate(data):
        for prompt, ages in arrivals:
            rows = [R([int(age % 3)], 0.0, max(step - age, 0)) for age in ages]
            buffer.add(new_rows(number, V(number, prompt, rows)))
            number += 1
        if step % 2 == 0:
            sampler.on_sync(buffer)
        if isinstance(sampler.readiness(buffer, step, settings_), Waiting):
            continue
        plan = sampler.sample(buffer, step, settings_)
        lag = replay_lag if plan.replay[0] else policy_lag
        assert plan.staleness.min() >= 0
        assert lag is None or plan.staleness.max() <= lag
        assert (m == 0) <= bool(plan.replay[0]) <= (m < 1)


def test_rows_of_incomplete_visits_are_sampled_in_no_branch() -> None:
    buffer = filled(visit(0, 0), V(1, 0, [R([66])] * 5, size=6), V(2, 1, [R([77])] * 2, size=3))
    sampler = Sampler(0)
    for _ in range(40):
        plan = sampler.sample(buffer, 0, conditions(1, 6, on_policy_probability=0.5))
        assert drawn_visits(buffer, plan) == [{0}]


# -- readiness


@pytest.mark.parametrize(
    ("visits", "options", "reason"),
    [
        ([], {"min_initial_trajectories": 3}, "initial trajectories: 0 of minInitialTrajectories 3"),
        ([visit(0, 0)], {}, "complete visits: 1 of promptsPerBatch 2"),
        (
            [visit(0, 0), visit(1, 1)],
            {"max_policy_lag": 3, "on_policy_probability": 1.0},
            "a complete visit at most 3 steps old (maxPolicyLag): the newest is 9 steps old",
        ),
        (
            [visit(0, 0), visit(1, 1)],
            {"max_policy_lag": 3, "max_replay_lag": 8},
            "a complete visit at most 3 steps old (maxPolicyLag) or a trajectory at most 8 steps old (maxReplayLag): "
            "the newest is 9 steps old",
        ),
        (
            [visit(0, 0, version=8), visit(1, 1, version=8)],
            {"max_policy_lag": 0, "on_policy_probability": 1.0},
            "a complete visit at most 0 steps old (maxPolicyLag): the newest is 1 steps old; "
            "with sync.intervalSteps 2 even new ones may be 1: allow that, or lower intervalSteps",
        ),
        (
            [visit(0, 0), visit(1, 1)],
            {"max_replay_ratio": 0.5},
            "new trajectories: replay ratio would be 0.67, above maxReplayRatio 0.5",
        ),
        (
            [visit(0, 0, num_rows=7), visit(1, 1, num_rows=8)],
            {"max_replay_ratio": 0.53},
            "new trajectories: replay ratio would be 0.533, above maxReplayRatio 0.53",
        ),
    ],
)
def test_what_is_awaited_is_said_in_words(visits: list[V], options: dict, reason: str) -> None:
    sampler = Sampler(0)
    buffer = filled(*visits)
    before = sampler.state()
    assert sampler.readiness(buffer, 9, conditions(**options)) == Waiting(reason)
    assert sampler.state() == before
    with pytest.raises(RuntimeError, match="waiting for"):
        sampler.sample(buffer, 9, conditions(**options))
    assert sampler.state() == before


def test_waiting_never_changes_what_is_drawn_later() -> None:
    calm, busy = Sampler(7), Sampler(7)
    buffer = filled(visit(0, 0))
    for _ in range(5):
        assert isinstance(busy.readiness(buffer, 0, conditions()), Waiting)
    buffer.add(new_rows(1, visit(1, 1)))
    for _ in range(5):
        assert busy.readiness(buffer, 0, conditions()) == Ready()
    a, b = (s.sample(buffer, 0, conditions()) for s in (calm, busy))
    assert a.rows.tolist() == b.rows.tolist()


@pytest.mark.parametrize("passing", [{"k": 1}, {"max_policy_lag": 1}])
def test_settings_that_came_and_went_in_a_wait_never_change_what_is_drawn_later(passing: dict) -> None:
    plain, changed = Sampler(0), Sampler(0)
    buffer = filled(*(visit(n, n, version=n) for n in range(2)))
    for n in range(2, 6):  # arrivals of one visit: under either setting a smaller pool than under the usual ones
        buffer.add(new_rows(n, visit(n, n, version=n)))
        for sampler in (plain, changed):
            sampler.sample(buffer, 6, conditions(2, 4, 2, on_policy_probability=1.0))
    changed.readiness(buffer, 6, conditions(2, 4, **{"k": 2, **passing}, on_policy_probability=1.0))
    plans = [pool_of(sampler, buffer, 1) for sampler in (plain, changed)]
    assert plans[0] == plans[1]


def test_replay_ratio_counts_the_last_100_steps_only() -> None:
    buffer, sampler = filled(visit(0, 0, num_rows=10), visit(1, 1, num_rows=10)), Sampler(0)
    settings_ = conditions(2, 5)  # 10 rows a step
    assert sampler.replay_ratio(buffer) == 0
    for _ in range(100):
        sampler.sample(buffer, 0, settings_)
    assert sampler.replay_ratio(buffer) == 1000 / 20
    sampler.sample(buffer, 0, settings_)
    assert sampler.replay_ratio(buffer) == 1000  # nothing came since the first of the last 100 steps: counts as one row
    buffer.add(new_rows(2, visit(2, 2, num_rows=50)))
    assert sampler.replay_ratio(buffer) == 1000 / 50
    at = conditions(2, 5, max_replay_ratio=20.0)
    assert sampler.readiness(buffer, 0, at) == Ready()
    assert isinstance(sampler.readiness(buffer, 0, conditions(2, 5, max_replay_ratio=19.9)), Waiting)


def test_duplicates_count_as_ingested_in_the_replay_ratio() -> None:
    buffer = filled(V(0, 0, [R([1])] * 10), V(1, 1, [R([1])] * 10))
    sampler = Sampler(0)
    sampler.sample(buffer, 0, conditions(2, 5))
    assert (len(buffer), sampler.replay_ratio(buffer)) == (2, 0.5)


# -- state


def data_of(step: int, rng: np.random.Generator) -> list[NewRows]:
    """Two shards with the rows of one visit, one of them possibly empty; many responses are equal."""
    responses = [R(rng.integers(0, 3, rng.integers(1, 4)).tolist(), float(rng.integers(2)), step) for _ in range(9)]
    split, prompt = int(rng.integers(0, 10)), int(rng.integers(8))
    parts = responses[:split], responses[split:]
    return [new_rows(2 * step + i, V(step, prompt, part, size=9)) for i, part in enumerate(parts)]


@pytest.mark.parametrize("ingest", ["Continuous", "AtSync"])
@pytest.mark.parametrize("deduplicate", [True, False])
def test_a_restored_run_draws_the_same_trajectories_with_the_same_weights(ingest: str, deduplicate: bool) -> None:
    rng = np.random.default_rng(0)
    options = {"capacity_per_prompt": 12, "deduplicate": deduplicate, "max_trajectories": 60}
    settings_ = conditions(3, 5, 2, on_policy_probability=0.5, ingest=ingest, max_replay_lag=15)
    runs = [(ReplayBuffer(**options), Sampler(4))]
    shards: dict[ShardId, NewRows] = {}
    for step in range(40):
        first, second = data_of(step, rng)
        shards.update({s.shard: s for s in (first, second)})
        runs[0][0].add(first)
        if step == 20:  # with half a visit pending, in mid-pass
            state, facts = runs[0][0].state(), json.loads(json.dumps(runs[0][1].state()))
            runs.append((ReplayBuffer(**options), Sampler(99)))
            runs[1][0].restore(state, partial(map, shards.__getitem__))
            runs[1][1].restore(facts)
        elif step > 20:
            runs[1][0].add(first)
        plans = []
        for buffer, sampler in runs:
            buffer.add(second)
            if step % 2 == 0:
                sampler.on_sync(buffer)
            if step > 5:
                plans.append((buffer, sampler.sample(buffer, step, settings_)))
        assert len({json.dumps(facts_of(*plan)) for plan in plans}) <= 1
    assert len(runs) == 2
    assert runs[0][1].state() == runs[1][1].state()


def facts_of(buffer: ReplayBuffer, plan: BatchPlan) -> list:
    """Everything of a plan but row ids."""
    names = ("weights", "prompt_ids", "replay", "with_replacement", "staleness")
    return [buffer.trajectory_ids(plan.rows), plan.mop_recycles, *(getattr(plan, n).tolist() for n in names)]


def test_settings_take_live_fields_from_the_live_configuration() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"uri": "file:///m"},
            "task": {"prompts": {"uri": "file:///p"}, "reward": {"name": "arithmetic"}},
            "objective": {"promptsPerBatch": 3, "responsesPerPrompt": 5},
            "buffer": {"maxPolicyLag": 1, "onPolicyProbability": 0.5, "minInitialTrajectories": 7},
        }
    )
    live = LiveConfig.model_validate(
        {
            "storage": {"uri": "file:///s"},
            "sync": {"intervalSteps": 4, "ingest": "AtSync"},
            "buffer": {"maxPolicyLag": 8, "maxReplayRatio": None, "onPolicyProbability": 0.1},
        }
    )
    assert SamplingSettings.from_config(config, live) == SamplingSettings(
        3, 5, 4, "AtSync", 0.5, "Reward", 1.0, 7, None, 8, None
    )


# -- the trained length histogram equals the generated one

SIZE, LANES, PROMPTS, SHARD_ROWS = 8, 60, 50, 24


def generation(num_visits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start of its visit, visit, length) of each response in order of its end, each (n,): long-tailed lengths.

    A lane begins a visit's SIZE responses together, and the next visit when the last has ended.
    """
    rng = np.random.default_rng(11)
    lengths = np.minimum(np.ceil(rng.pareto(1.1, (num_visits, SIZE)) * 3), 600).astype(int) + 1
    free, start = rng.uniform(0, 600, LANES), np.zeros(num_visits)
    for i in range(num_visits):
        lane = int(free.argmin())
        start[i] = free[lane]
        free[lane] += lengths[i].max()
    order = np.argsort((start[:, None] + lengths).ravel(), kind="stable")
    return start.repeat(SIZE)[order], np.arange(num_visits).repeat(SIZE)[order], lengths.ravel()[order]


def trained_lengths(ticks_a_step: float, **options: object) -> tuple[list[int], np.ndarray]:
    """(trained, generated) lengths of a run that takes a step of two groups every so many ticks.

    Policy versions are those at the start of each response; short responses are often equal.
    """
    starts, visits, lengths = generation(3000)
    ends = starts + lengths
    buffer, sampler, trained = ReplayBuffer(capacity_per_prompt=100, **options), Sampler(0), []
    settings_ = conditions(2, SIZE, 2, on_policy_probability=1.0)
    begin = 0
    for step in range(int(ends[-1] * 0.9 / ticks_a_step)):  # the last visits have no time to become complete
        while ends[min(begin + SHARD_ROWS, len(ends) - 1)] <= step * ticks_a_step:
            by_visit: dict[int, list[R]] = {}
            for i in range(begin, begin + SHARD_ROWS):
                tokens = [lengths[i]] * lengths[i] if lengths[i] < 6 else [i] + [0] * (lengths[i] - 1)
                by_visit.setdefault(int(visits[i]), []).append(R(tokens, 1.0, int(starts[i] / ticks_a_step)))
            buffer.add(new_rows(begin, *(V(n, n % PROMPTS, rows, size=SIZE) for n, rows in by_visit.items())))
            begin += SHARD_ROWS
        if isinstance(sampler.readiness(buffer, step, settings_), Ready):
            plan = sampler.sample(buffer, step, settings_)
            trained += np.repeat(buffer.num_tokens(plan.rows), plan.weights.astype(int).ravel()).tolist()
    return trained, lengths[:begin]


@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("ticks_a_step", [2.0, 8.0])  # the trainer uses visits more than once; the searchers outrun it
def test_trained_lengths_are_distributed_as_generated_ones(deduplicate: bool, ticks_a_step: float) -> None:
    trained, generated = trained_lengths(ticks_a_step, deduplicate=deduplicate)
    assert len(trained) > 5_000
    assert ks_2samp(trained, generated).pvalue > 0.01


def test_the_length_test_sees_what_the_rules_prevent() -> None:
    _, visits, lengths = generation(3000)
    seen, early = Counter(), []
    for number, length in zip(visits.tolist(), lengths.tolist(), strict=True):
        seen[number] += 1
        if seen[number] <= SIZE // 2:  # a visit trained on when half of it is there
            early.append(length)
    assert ks_2samp(early, lengths).pvalue < 1e-6
    distinct = [length for _, length in {(n, x) for n, x in zip(visits.tolist(), lengths.tolist(), strict=True)}]
    assert ks_2samp(distinct, lengths).pvalue < 1e-6  # equal responses counted once
    quick = [x for n, x in zip(visits, lengths, strict=True) if lengths[visits == n].max() < 60]
    assert ks_2samp(quick, lengths).pvalue < 1e-6  # visits in order of their policy: the quick ones
