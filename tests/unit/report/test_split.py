"""Where time went, from history rows of this version, of older ones, and of searchers that lie."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic_run import run_record, searcher, step_row, whole_run

from tba.report.history import assemble
from tba.report.page import render_report
from tba.report.split import (
    SEARCHER_PHASES,
    TRAINER_PHASES,
    coarsen,
    in_words,
    searcher_stretches,
    searcher_time,
    time_of_step,
    trainer_stretches,
    trainer_time,
)

PHASES = {"wait_data": 1.0, "reference": 2.0, "forward_backward": 4.0, "other": 3.0}


def told(name, step, **stats):
    return searcher(name, name * 32, step=step).model_copy(update={"stats": {k: float(v) for k, v in stats.items()}})


def test_a_step_by_hand():
    time = time_of_step(step_row(2, phase_seconds=PHASES, model_flops=3e12, peak_flops=1e12))
    assert time.total == 10.0 and list(time.seconds) == list(TRAINER_PHASES)
    assert time.idle_percent == pytest.approx(10.0)
    assert time.mfu == pytest.approx(0.3) and time.mfu_computing == pytest.approx(0.5)


@pytest.mark.parametrize(("flops", "peak"), [(None, 1e12), (3e12, None)])
def test_without_a_known_peak_or_model_there_is_no_utilisation(flops, peak):
    time = time_of_step(step_row(2, phase_seconds=PHASES, model_flops=flops, peak_flops=peak))
    assert (time.mfu, time.mfu_computing) == (None, None)


def test_a_row_of_an_older_version_still_reads_and_its_known_parts_are_shown():
    old = step_row(3).model_dump(mode="json", by_alias=True)
    for name in ("phaseSeconds", "scoredTokens", "modelFlops", "peakFlops"):
        del old[name]
    row = type(step_row(3)).model_validate(old)
    time = time_of_step(row)
    assert time.seconds["forward_backward"] == row.train_seconds and time.seconds["reference"] == row.score_seconds
    assert time.total == pytest.approx(row.step_seconds + row.wait_data_seconds + row.wait_storage_seconds)
    assert time.total == pytest.approx(row.span_seconds) and time.mfu is None


def test_a_phase_of_a_newer_version_is_other():
    assert time_of_step(step_row(2, phase_seconds={"dream": 2.0, "other": 1.0})).seconds["other"] == 3.0


def test_a_run_leaves_out_the_start_of_its_first_trainer():
    rows = [step_row(1, phase_seconds={"wait_data": 60.0}), step_row(2, phase_seconds=PHASES)]
    assert trainer_time(assemble(rows)).seconds["wait_data"] == 1.0
    assert trainer_time(assemble(rows[:1])).seconds["wait_data"] == 60.0


def test_searchers_of_this_and_older_versions_by_hand():
    rows = [
        told("a", 10, generate_seconds=6, load_seconds=1, wait_reward_seconds=2, other_seconds=1, up_seconds=10,
             model_flops=3e12, peak_flops=1e12),
        told("b", 10, generate_seconds=5, wait_idle_seconds=1, up_seconds=8),
    ]  # fmt: skip
    time = searcher_time(assemble(rows))
    assert time.seconds == {"generate": 11, "swap": 1, "asleep": 0, "wait_weights": 0, "wait_reward": 2,
                            "wait_storage": 0, "wait_idle": 1, "other": 3}  # fmt: skip
    assert time.idle_percent == pytest.approx(100 * 3 / 18)
    assert time.mfu == pytest.approx(0.3), "of the searcher whose peak is known"
    assert time.mfu_computing == pytest.approx(0.5)


def test_stretches_of_searchers_are_what_each_did_since_it_was_last_told_of():
    rows = [
        told("a", 10, generate_seconds=5, other_seconds=0, up_seconds=5),
        told("b", 10, generate_seconds=1, other_seconds=0, up_seconds=1),
        told("a", 20, generate_seconds=6, wait_storage_seconds=3, other_seconds=0, up_seconds=9),
        told("a", 20, generate_seconds=6, wait_storage_seconds=3, other_seconds=0, up_seconds=9),
    ]
    first, second = searcher_stretches(assemble(rows))
    assert (first.first_step, first.last_step, first.time.seconds["generate"]) == (0, 10, 6)
    assert (second.first_step, second.last_step) == (10, 20)
    assert (second.time.seconds["generate"], second.time.seconds["wait_storage"]) == (1, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -5.0])
def test_what_a_searcher_claims_cannot_break_the_report(value):
    rows = [step_row(1), told("a", 10, generate_seconds=value, up_seconds=value, peak_flops=value, model_flops=value)]
    time = searcher_time(assemble(rows))
    assert time.total == 0 and time.mfu is None and searcher_stretches(assemble(rows)) == []
    assert "Where time goes" in render_report(assemble(rows, run=run_record()), now=0.0)


@given(st.integers(0, 300), st.integers(1, 80))
def test_coarser_stretches_lose_no_second_and_no_step(steps, limit):
    stretches = trainer_stretches(assemble([step_row(s) for s in range(1, steps + 1)]))
    coarse = coarsen(stretches, limit)
    assert len(coarse) <= limit
    assert sum(s.time.total for s in coarse) == pytest.approx(sum(s.time.total for s in stretches))
    assert [s.first_step for s in coarse[1:]] == [s.last_step for s in coarse[:-1]]


def test_words_name_the_largest_share_first_and_leave_out_what_is_none():
    time = time_of_step(step_row(2, phase_seconds=PHASES, model_flops=3e12, peak_flops=1e12))
    assert in_words(time, TRAINER_PHASES) == (
        "forward and backward 40.0 %, other 30.0 %, reference scoring 20.0 %, wait for data 10.0 %, MFU 30.0 %"
    )
    assert in_words(searcher_time(assemble([])), SEARCHER_PHASES) == ""


def test_the_page_tells_both_roles_in_figures_in_words_and_in_a_table():
    text = render_report(assemble(whole_run(60), run=run_record()), now=0.0)
    assert 'aria-label="Where the trainer&#39;s time goes: forward and backward' in text
    assert 'aria-label="Where the searchers&#39; time goes: generate 80.0 %, other 7.0 %' in text
    assert "<td>Searchers</td><td>generate</td>" in text
    assert "Searchers: MFU 10.0 % of all the time, 12.5 % while the model computes." in text
    assert "<dt>Trainer MFU</dt>" in text


def test_without_gpus_nothing_is_said_of_mfu():
    rows = [step_row(s, model_flops=None, peak_flops=None) for s in range(1, 4)]
    assert "<dt>Trainer MFU</dt>" not in render_report(assemble(rows, run=run_record()), now=0.0)
