"""What follows from recorded runs: thresholds, eta, the bound, and that a run is kept once."""

import json
from dataclasses import replace

import pytest
from bench.gpu.choose_layout import best
from bench.gpu.count_runs import (
    ON_ONE_CARD,
    ONE_CARD,
    SHARED,
    SLOW_TASK,
    TWO_CARDS,
    CountRun,
    append_run,
    judge,
    read_runs,
)
from bench.gpu.curves import Costs, Point, bound, eta, reach
from bench.gpu.learning_curves import compared, draw_all
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(0.01, 100)


def run(arm: int, seed: int = 0, *, speed: float = 1.0, variant: str = "", **more) -> CountRun:
    """Ten steps a score of .05, from .3, `speed` steps a second."""
    return CountRun(
        task="count",
        arm=arm,
        seed=seed,
        gpus=2,
        variant=variant,
        steps=[((i + 1) / speed, 0.3) for i in range(100)],
        held_out=[(s, s / speed, 0.3 + 0.005 * s) for s in range(0, 101, 10)],
        machine="there",
        date="2026-01-01",
        command="python bench.py",
        **more,
    )


def test_the_bound_is_that_of_the_measured_example():
    """bench.md §3: g 1.0, t 0.8, o .03 give .92 without a tail; 1.3 needs a tail of about 1.8."""
    assert bound(Costs(1.0, 0.8, 0.03, 1.0)) == pytest.approx(0.915)
    assert bound(Costs(1.0, 0.8, 0.03, 1.77)) == pytest.approx(1.3)


@given(seconds, seconds, seconds, st.floats(1, 10), st.floats(1.01, 3))
def test_the_bound_rises_with_the_tail_and_is_best_in_balance(g, t, o, tau, more):
    assert bound(Costs(g, t, o, tau * more)) > bound(Costs(g, t, o, tau))
    even = (g + t) / 2
    assert bound(Costs(even, even, o, 1.0)) >= bound(Costs(g, t, o, 1.0)) * (1 - 1e-9)


def test_a_threshold_between_two_evaluations_is_reached_between_them():
    points = [Point(0, 0.0, 0.3), Point(10, 20.0, 0.5), Point(20, 30.0, 0.7)]
    assert reach(points, 0.4) == pytest.approx((5, 10))
    assert reach(points, 0.5) == pytest.approx((10, 20))
    assert reach(points, 0.6) == pytest.approx((15, 25))
    assert reach(points, 0.3) == (0, 0.0)
    assert reach(points, 0.71) is None
    assert reach([], 0.1) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1))
def test_a_threshold_is_reached_at_the_first_score_that_is_high_enough(scores, threshold):
    points = [Point(10 * i, 7.0 * i, s) for i, s in enumerate(scores)]
    found = reach(points, threshold)
    above = [i for i, s in enumerate(scores) if s >= threshold]
    assert (found is None) == (not above)
    if found:
        first = above[0]
        assert 10 * max(0, first - 1) <= found[0] <= 10 * first
        assert found[1] == pytest.approx(0.7 * found[0])


def test_eta_is_below_one_where_ours_needs_more_steps():
    assert eta(40, 50) == 0.8


def test_a_run_that_was_asked_for_twice_counts_once_and_the_newer_one(tmp_path):
    file = tmp_path / "deep" / "runs.jsonl"
    for speed in (1.0, 2.0):
        append_run(file, run(5, speed=speed))
    append_run(file, run(5, 1))
    append_run(file, run(5, variant="other"))
    runs = read_runs(file)
    assert len(runs) == 3
    assert {r.key: r.steps_per_second for r in runs}["count", 5, 0, "", ""] == pytest.approx(2.0)
    assert read_runs(tmp_path / "none.jsonl") == []


def test_rows_compare_with_two_synchronous_gpus_and_keep_where_they_were_measured():
    costs = {"generate": 1.0, "train": 0.8, "switch": 0.03, "tail": 2.0}
    rows = judge([run(1, speed=0.6, costs=costs), run(2, speed=1.0), run(5, 0, speed=1.5), run(5, 1, speed=1.7)])
    by_metric = {r.metric: r for r in rows}
    speed = next(r for m, r in by_metric.items() if "asynchronous" in m and m.endswith("steps/s"))
    assert speed.value == pytest.approx(1.6) and speed.seeds == [0, 1]
    assert speed.ratio == pytest.approx(1.6) and speed.baseline and "2 GPUs" in str(speed.baseline["name"])
    limit = (2.0 * 1.0 + 0.8 + 0.03) / 2
    assert speed.target == f">= {0.9 * limit:.3f}" and speed.met is True
    assert f"{limit:.2f}" in speed.note
    time_to = next(r for m, r in by_metric.items() if "asynchronous" in m and m.endswith("seconds to 0.6"))
    assert time_to.baseline and time_to.baseline["value"] == pytest.approx(60.0)
    assert {r.machine for r in rows} == {"there"} and {r.date for r in rows} == {"2026-01-01"}
    eta_row = next(r for m, r in by_metric.items() if "eta at 0.6" in m)
    assert eta_row.value == pytest.approx(1.0)


def test_only_runs_from_the_same_weights_are_compared():
    rows = judge([run(2, start="a"), run(5, start="a", speed=2.0), run(2, start="b"), run(9, start="c")])
    speeds = {r.metric: r for r in rows if r.metric.endswith("steps/s")}
    assert len(speeds) == 4 and all("start " in metric for metric in speeds)
    assert [r.ratio for m, r in speeds.items() if "1 searcher" in m] == [pytest.approx(2.0)]
    assert [r.ratio for m, r in speeds.items() if "small searchers" in m] == [None]
    again = run(2, start="b")
    assert run(2, start="a").key != again.key == run(2, start="b").key


def test_the_peer_is_beaten_at_the_highest_threshold_that_most_runs_of_both_reach():
    slow, quick = [run(3, seed, speed=0.5) for seed in (0, 1, 2)], [run(9, seed, speed=1.5) for seed in (0, 1)]
    for one in slow[:2]:
        one.held_out = [p for p in one.held_out if p[2] < 0.65]
    row = next(r for r in judge(slow + quick) if "times as fast" in r.metric)
    assert "to 0.6 as TRL" in row.metric and row.value == pytest.approx(3.0) and row.met
    assert "n = 2, TRL n = 3" in row.note


def test_where_rewards_wait_tau_is_what_a_step_takes_beyond_generating_training_and_switching():
    costs = {"generate": 1.0, "train": 0.8, "switch": 0.03, "tail": 1.0}
    runs = [run(2, speed=0.5, costs=costs)] + [replace(run(a, speed=s), task=SLOW_TASK) for a, s in ((2, 0.4), (5, 1))]
    speeds = {r.metric: r for r in judge(runs) if r.metric.endswith("steps/s")}
    of_both = [r for name, r in speeds.items() if name.startswith(SLOW_TASK)]
    assert len(of_both) == 2 and all(r.target is None for r in of_both)
    assert all(
        "g 1.00 t 0.80 o 0.030 s, tau 1.67, bound of 1 + 1 against 2 synchronous 1.25" in r.note for r in of_both
    )


def test_where_rewards_wait_and_nobody_measured_without_waits_there_is_no_bound():
    runs = [replace(run(a, speed=s), task=SLOW_TASK) for a, s in ((2, 0.4), (5, 1))]
    assert all("bound" not in r.note for r in judge(runs))


def test_a_run_of_one_step_has_the_speed_of_that_step():
    one = run(4)
    one.steps = [(4.0, 0.3)]
    assert one.steps_per_second == 0.25


def test_a_run_that_never_gets_there_is_told_and_not_dropped(tmp_path):
    low = run(5, 1)
    low.held_out = [(0, 0.0, 0.3), (10, 10.0, 0.31)]
    rows = judge([run(5, 0), low])
    row = next(r for r in rows if r.metric.endswith("seconds to 0.5"))
    assert "1 of 2 runs reached it" in row.note and row.runs == [pytest.approx(40.0)]
    file = tmp_path / "runs.jsonl"
    append_run(file, low)
    assert json.loads(file.read_text())["held_out"] == [[0, 0.0, 0.3], [10, 10.0, 0.31]]


def test_curves_are_of_the_start_with_most_arms_and_the_same_bytes_each_time(tmp_path):
    here = {"variant": TWO_CARDS, "start": "a"}
    runs = [run(2, **here), run(9, **here), run(9, 1, **here)]
    others = [run(5, seed, variant=TWO_CARDS, start="b") for seed in range(5)] + [run(1, start="a", variant="other")]
    assert compared([*others, *runs], TWO_CARDS) == runs
    for name in ("one.svg", "two.svg"):
        draw_all(runs, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text() and "share them (n = 2)" in drawn
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.svg", "two.svg"], "nothing ran on one card"


def test_what_ran_on_one_card_has_a_picture_of_its_own(tmp_path):
    alone = [run(3, variant=ONE_CARD), run(9, variant=f"{ONE_CARD}, ratio to the sampler")]
    for one in alone:
        one.gpus = 1
    assert compared([run(2, variant=TWO_CARDS), *alone], ONE_CARD) == alone
    draw_all(alone, tmp_path / "x.svg")
    drawn = (tmp_path / "x_one_card.svg").read_text()
    assert "TRL GRPO, 1 GPU colocated (n = 1)" in drawn and [p.name for p in tmp_path.iterdir()] == ["x_one_card.svg"]


def test_runs_that_had_a_host_of_two_cards_stand_beside_each_other():
    ours = run(9, speed=2.0, variant=f"{TWO_CARDS}, ratio to the sampler")
    elsewhere = replace(run(2, speed=1.9), machine="another")
    rows = [r for r in judge([ours, elsewhere, run(2, variant=TWO_CARDS), run(3, speed=0.25, variant=TWO_CARDS)])]
    (speed,) = (r for r in rows if r.metric.endswith("steps/s") and "ratio to the sampler" in r.metric)
    assert speed.ratio == pytest.approx(2.0)
    trl, synchronous = (r for r in rows if "times as fast" in r.metric and "ratio to the sampler" in r.metric)
    assert trl.value == pytest.approx(8.0) and trl.place.table == "count on a host of two GPUs"
    assert (synchronous.value, synchronous.target, synchronous.met) == (pytest.approx(2.0), ">= 1.3", True)


def test_several_searchers_are_held_against_as_many_times_one():
    def scaled(number: int, tokens: float, **more) -> CountRun:
        return run(7, variant=f"{number} searcher{'s' * (number > 1)}", settings=[f"searcher.replicas={number}"],
                   facts={"response tokens/s": tokens, "trainer waits for data": 0.25}, **more)  # fmt: skip

    three = run(7, facts={"response tokens/s": 240.0, "trainer waits for data": 0.01})
    rows = {r.metric: r for r in judge([scaled(1, 100.0), scaled(2, 196.0), three]) if "linear" in r.metric}
    found = {metric.partition("(")[2].split(",")[0]: row for metric, row in rows.items()}
    assert {name: round(row.value, 2) for name, row in found.items()} == {"2 searchers": 0.98, "3 searchers": 0.8}
    assert (
        found["2 searchers"].met and not found["3 searchers"].met and "waits for data 0.01" in found["3 searchers"].note
    )
    speeds = [r.metric for r in judge([scaled(1, 100.0), three]) if r.metric.endswith(": steps/s")]
    assert {m.partition(" (")[2] for m in speeds} == {"1 searcher): steps/s", "3 searchers): steps/s"}
    assert not [r for r in judge([scaled(1, 100.0, start="a"), three]) if "linear" in r.metric]


def test_the_layout_is_chosen_by_its_speed_and_by_how_old_its_data_is():
    def look(name: str, speed: float, staleness: float, start: str = "a") -> CountRun:
        return run(9, variant=f"speed, {name}", speed=speed, start=start,
                   facts={"searchers": name, "mean staleness": staleness})  # fmt: skip

    looks = [look("5x128", 1.8, 4.3), look("2x128", 1.7, 2.5), look("8x64", 1.0, 1.0), look("9x9", 9.0, 1.0, "b")]
    chosen = best(looks, "a")
    assert chosen is not None and chosen.facts["searchers"] == "2x128"
    assert best(looks, "c") is None and best([run(9, start="c")], "c") is None


def test_rows_of_the_start_that_was_measured_last_come_first_and_name_it():
    rows = judge([run(2, start="b"), run(2, start="a"), run(5, start="a"), run(2, start="b", variant="later")])
    assert list(dict.fromkeys(r.place.start for r in rows if r.place)) == ["b", "a"]
    assert all(f"start {r.place.start}" in r.metric for r in rows if r.place)


def test_a_row_stands_in_the_line_of_its_arm_and_variant_and_a_speed_has_the_costs_beside():
    costs = {"generate": 1.0, "train": 0.8, "switch": 0.03, "tail": 2.0}
    facts = {"response tokens/s": 9.0, "mean staleness": 4.5}
    rows = judge([run(1), run(2, costs=costs), run(7, facts=facts), run(3)])
    places = [r.place for r in rows if r.place]
    assert len(places) == len(rows)
    assert len({(str(p.subject), p.column, p.label) for p in places}) == len(rows)
    [many] = [p for p in places if p.column == "steps/s" and p.subject["arm"].startswith("7: ")]
    assert many.subject["variant"] == "3 searchers"
    known = {"g, s": 1.0, "t, s": 0.8, "o, s": 0.03, "tau": 2.0, "bound of 1 + 1": bound(Costs(**costs))}
    assert many.facts == {**known, "g, t, o, tau, bound of": "arm 2", "mean lag, steps": 4.5}
    assert [p.beside for p in places if p.column == "eta" and p.label == "to 0.6"] == ["60 / 60 steps"]


def test_tokens_a_second_are_told_of_every_arm_that_measured_them():
    rows = judge([run(arm, facts={"response tokens/s": 10.0 * arm}) for arm in (1, 3, 9)] + [run(2)])
    assert [r.value for r in rows if r.metric.endswith("tokens/s")] == [10.0, 30.0, 90.0]


def test_seconds_of_another_machine_are_no_peer_but_steps_are():
    there = [run(2), run(3)]
    here = replace(run(9), machine="16 cores, 1 x a card", gpus=1)
    beside = {r.metric: r.baseline for r in judge([*there, run(9)])}
    alone = {r.metric: r.baseline for r in judge([*there, here])}
    shared, one = "count, ours asynchronous, 2 GPUs, small searchers share them", f"count, {ON_ONE_CARD[SHARED]}"
    assert beside[f"{shared}: steps/s"] and beside[f"{shared}: seconds to 0.5"]
    assert alone[f"{one}: steps/s"] is None and alone[f"{one}: seconds to 0.5"] is None
    assert f"{one}: eta at 0.5" in alone
    assert any("times as fast" in m for m in beside) and not any("times as fast" in m for m in alone)
    # What ran on one card beside it is its peer, before the arm of two cards elsewhere.
    peers = [replace(run(a, speed=0.5), variant=ONE_CARD, machine=here.machine, gpus=1) for a in (1, 3)]
    rows = {r.metric: r for r in judge([*there, here, *peers])}
    assert rows[f"{one}: steps/s"].baseline == {"name": "own synchronous loop, 1 GPU", "value": pytest.approx(0.5)}
    assert rows[f"{one}: times as fast to 0.75 as {ON_ONE_CARD[3]}"].value == pytest.approx(2)
