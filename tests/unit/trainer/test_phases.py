"""The loop's time by phase: parts sum to the whole, and a wait is visible while it lasts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba import telemetry
from tba.trainer.phases import Phases, split

seconds = st.floats(-1.0, 1e5)
parts = st.dictionaries(st.sampled_from(["a", "b", "c", "other"]), seconds)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def counted(phase):
    return telemetry.TRAINER_SECONDS.labels(phase)._value.get()


@given(st.floats(0, 1e5), parts)
def test_parts_are_never_negative_and_sum_to_the_whole(whole, given_parts):
    result = split(whole, given_parts)
    assert all(value >= 0 for value in result.values())
    assert sum(result.values()) == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_parts_that_fit_are_kept_and_the_rest_is_other():
    assert split(2.0, {"collate": 0.5, "optimizer": 0.25}) == {"collate": 0.5, "optimizer": 0.25, "other": 1.25}


def test_parts_of_another_clock_that_exceed_the_whole_shrink_in_proportion():
    assert split(2.0, {"a": 3.0, "b": 1.0}) == {"a": 1.5, "b": 0.5, "other": 0.0}


def test_the_counter_rises_with_each_piece_of_a_wait_and_not_only_at_the_next_step():
    clock = Clock()
    phases = Phases(clock=clock)
    counter = telemetry.TRAINER_WAIT.labels("data")._value
    before, phase_before = counter.get(), counted("wait_data")
    for _ in range(3):
        with phases.piece("wait_data"):
            clock.now += 0.5
    assert (counter.get() - before, counted("wait_data") - phase_before) == pytest.approx((1.5, 1.5))
    assert phases.seconds("wait_data") == 1.5


def test_a_steps_split_covers_all_since_the_step_before_and_each_second_once():
    clock = Clock()
    phases = Phases(clock=clock)
    before = {name: counted(name) for name in ("stage", "collate", "optimizer", "other")}
    with phases.piece("stage"):
        clock.now += 1.0
    clock.now += 0.25  # housekeeping
    clock.now += 4.0  # the step
    timing = phases.stepped(4.0, {"collate": 1.0, "optimizer": 2.5})
    assert timing.phase_seconds == {"stage": 1.0, "collate": 1.0, "optimizer": 2.5, "other": 0.75}
    assert (timing.step_seconds, timing.total_seconds) == (4.0, 5.25)
    assert {name: counted(name) - value for name, value in before.items()} == pytest.approx(timing.phase_seconds)
    with phases.piece("capture"):
        clock.now += 0.5
    assert phases.stepped(0.0, {}).phase_seconds == {"capture": 0.5, "other": 0.0}


@given(
    st.lists(st.tuples(st.sampled_from(["ingest", "stage", "step"]), st.floats(0, 50), st.floats(0, 50))),
    st.sampled_from([0.5, 1.0, 1.1]),
)
def test_over_any_run_the_splits_sum_to_the_time_that_passed(doings, factor):
    clock = Clock()
    phases = Phases(clock=clock)
    begun, told = clock.now, 0.0
    for doing, inside, between in doings:
        if doing == "step":
            clock.now += inside
            told += phases.stepped(inside, {"forward_backward": inside * factor}).total_seconds
            begun_next = clock.now
            assert told == pytest.approx(begun_next - begun, rel=1e-9, abs=1e-6)
        else:
            with phases.piece(doing):
                clock.now += inside
        clock.now += between


def test_an_error_inside_a_piece_still_counts_its_time():
    clock = Clock()
    phases = Phases(clock=clock)
    with pytest.raises(ZeroDivisionError), phases.piece("stage"):
        clock.now += 2.0
        raise ZeroDivisionError
    assert phases.seconds("stage") == 2.0
