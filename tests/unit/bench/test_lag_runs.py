"""What follows from runs with stale data: steps, eta against fresh data of the same settings and weights."""

from dataclasses import asdict

import pytest
from bench.gpu.bench_lag import TASKS, LagRun, asynchronous, fresh, judge, parse_cell
from bench.gpu.count_runs import CountRun, append_row


def lag_run(cell: str, gain: float, seed: int = 0, start: str = "") -> LagRun:
    """From .3, `gain` a step."""
    held_out = [(step, 0.3 + gain * step) for step in range(0, 101, 10)]
    return LagRun(cell, seed, [0.3] * 100, held_out, "there", "2026-01-01", "python bench.py", start)


def etas(runs, task="count"):
    return {r.metric: r.value for r in judge(runs, task=TASKS[task]) if "eta" in r.metric}


def test_a_cell_is_its_lag_and_its_changes():
    assert parse_cell("4") == (4, [])
    changes = ["objective.parameters.baselineShift=0.1", "objective.beta=0.02"]
    assert parse_cell("8:baselineShift=0.1,objective.beta=0.02") == (8, changes)
    for wrong in ("x", "4:beta", "4:=1"):
        with pytest.raises(SystemExit, match="a cell is LAG"):
            parse_cell(wrong)


def test_stale_data_is_held_against_fresh_data_of_the_same_rate_and_beta():
    assert fresh("16:ratioAlpha=1,baselineShift=0.1") == "0"
    assert fresh("16:ratioAlpha=1,objective.learningRate=3e-4,objective.beta=0.1") == (
        "0:objective.learningRate=3e-4,objective.beta=0.1"
    )
    rate = "objective.learningRate=3e-4"
    found = etas([lag_run(f"0:{rate}", 0.006), lag_run(f"4:baselineShift=0.1,{rate}", 0.003), lag_run("4", 0.003)])
    assert found == {f"4:baselineShift=0.1,{rate}: eta at {t:g}": pytest.approx(0.5) for t in (0.5, 0.6)}


def test_what_holds_on_to_stale_data_has_a_price_on_fresh_data_and_it_is_told():
    found = etas([lag_run("0", 0.006), lag_run("0:baselineShift=0.1", 0.005)], "arithmetic")
    assert found == {f"0:baselineShift=0.1: eta at {t:g}": pytest.approx(5 / 6) for t in (0.7, 0.8)}


def test_only_runs_from_the_same_weights_are_held_against_each_other():
    found = etas([lag_run("0", 0.006, start="a"), lag_run("4", 0.003, start="a"), lag_run("4", 0.001, start="b")])
    assert set(found) == {f"4 (start a): eta at {t:g}" for t in (0.5, 0.6)}


def test_asynchronous_runs_stand_beside_unless_their_speed_alone_was_looked_at(tmp_path):
    def played(seed: int, staleness: float, held_out: list[tuple[int, float, float]], variant: str = "") -> CountRun:
        return CountRun(task="count", arm=9, seed=seed, gpus=2, steps=[(1.0, 0.3)], held_out=held_out, variant=variant,
                        start="a", facts={"mean staleness": staleness})  # fmt: skip

    curve = [(0, 0.0, 0.3), (50, 9.0, 0.65)]
    for one in (played(0, 4.25, curve), played(1, 4.75, curve), played(0, 9.0, [], "speed")):
        append_row(tmp_path / "runs.jsonl", asdict(one))
    found = asynchronous(tmp_path / "runs.jsonl")
    assert [(r.cell, r.seed, r.start) for r in found] == [("arm 9, mean lag 4.5 (as it is)", s, "a") for s in (0, 1)]
    rows = judge([lag_run("0", 0.01, start="a")], found)
    assert any("arm 9" in r.metric and "eta at 0.6" in r.metric for r in rows)


def test_a_table_holds_what_may_be_compared_and_the_newest_start_comes_first():
    rate = "objective.learningRate=3e-4"
    runs = [lag_run(cell, 0.006, start="old") for cell in ("0", "4:baselineShift=0.1")]
    runs += [lag_run(cell, 0.006, start="new") for cell in (f"0:baselineShift=0.1,{rate}", f"0:{rate}", "16")]
    places = [r.place for r in judge(runs) if r.metric.endswith("steps to 0.6") and r.place]
    assert [(p.start, p.table, p.subject["lag"], p.subject["objective"]) for p in places] == [
        ("new", "learningRate=3e-4", "0", "as it is"),
        ("new", "learningRate=3e-4", "0", "baselineShift=0.1"),
        ("new", "", "16", "as it is"),
        ("old", "", "0", "as it is"),
        ("old", "", "4", "baselineShift=0.1"),
    ]
