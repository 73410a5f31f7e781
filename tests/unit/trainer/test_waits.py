"""Waits of the loop: summed by cause, and visible while they last."""

from tba import telemetry
from tba.trainer.waits import Waits


def test_the_counter_rises_with_each_piece_of_a_wait_and_not_only_at_the_next_step():
    now = 0.0
    waits = Waits(clock=lambda: now)
    counter = telemetry.TRAINER_WAIT.labels("data")._value
    before = counter.get()
    for _ in range(3):
        with waits.piece("data"):
            now += 0.5
    assert counter.get() - before == 1.5
    with waits.piece("storage"):
        now += 2.0
    assert (waits.seconds("data"), waits.seconds("storage")) == (1.5, 2.0)
    waits.reset()
    assert (waits.seconds("data"), waits.seconds("storage"), counter.get() - before) == (0.0, 0.0, 1.5)
