"""A searcher's time by phase, as its shard headers carry it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba import telemetry
from tba.searcher.stats import PHASES, SearcherStats


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def begun():
    clock = Clock()
    stats = SearcherStats(clock=clock)
    stats.begin()
    return stats, clock


def phases_of(header):
    return sum(header[f"{phase}_seconds"] for phase in PHASES) + header["other_seconds"]


@given(st.lists(st.tuples(st.sampled_from([*PHASES, "mark"]), st.floats(0, 1e4), st.floats(0, 1e4))))
def test_in_every_header_the_phases_sum_to_the_time_that_the_loop_was_up(doings):
    stats, clock = begun()
    for doing, inside, between in doings:
        if doing == "mark":
            stats.mark()
            assert stats.to_dict()["up_seconds"] == clock.now - 50.0
        else:
            with stats.piece(doing):
                clock.now += inside
        clock.now += between
        header = stats.to_dict()
        assert phases_of(header) == pytest.approx(header["up_seconds"], rel=1e-9, abs=1e-6)
        assert all(value >= 0 for value in header.values())


def test_times_of_a_header_are_those_of_the_mark_and_counts_are_the_newest():
    stats, clock = begun()
    with stats.piece("generate"):
        clock.now += 3.0
    clock.now += 1.0
    stats.mark()
    with stats.piece("wait_reward"):
        clock.now += 7.0
    stats.generated_rows = 9
    header = stats.to_dict()
    assert (header["generate_seconds"], header["other_seconds"], header["up_seconds"]) == (3.0, 1.0, 4.0)
    assert (header["wait_reward_seconds"], header["generated_rows"]) == (0.0, 9.0)
    assert stats.wait_reward_seconds == 7.0


def test_metrics_rise_with_each_piece_and_call_a_swap_a_swap():
    stats, clock = begun()
    counter = {p: telemetry.SEARCHER_SECONDS.labels(p)._value for p in ("swap", "wait_idle", "other")}
    before = {p: c.get() for p, c in counter.items()}
    with stats.piece("load"):
        clock.now += 2.0
    with stats.piece("wait_idle"):
        clock.now += 4.0
    clock.now += 0.5
    stats.mark()
    stats.mark()
    assert {p: c.get() - before[p] for p, c in counter.items()} == pytest.approx(
        {"swap": 2.0, "wait_idle": 4.0, "other": 0.5}
    )


def test_a_header_before_the_loop_begins_has_all_names_and_no_time():
    header = SearcherStats().to_dict()
    assert header["up_seconds"] == 0.0
    assert not {"clock", "_began", "_marked"} & set(header)
