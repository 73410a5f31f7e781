"""Turns on a shared device: both ends of the real socket, steps of both sides in any order."""

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.gate import Gate, Gatekeeper

SOON = 10.0


def until(condition) -> None:
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


class Pair:
    """A trainer's end, and a searcher that generates whenever it may."""

    def __init__(self) -> None:
        self.keeper = Gatekeeper()
        self.gone = threading.Event()
        self.gate = Gate(os.dup(self.keeper.fd), on_closed=self.gone.set)
        self.keeper.passed()
        self.generated = 0

    def turn(self) -> None:
        """Once around the searcher's loop."""
        if not self.gate.open:
            self.gate.asleep()
            return
        self.gate.awake()
        if not self.generated:
            self.gate.starting()
        self.generated += 1

    def close(self) -> None:
        self.keeper.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def awake(pair: Pair) -> None:
    """In a turn, its engine started."""
    pair.turn()
    pair.keeper.wake()
    until(lambda: pair.gate.open)
    pair.turn()
    pair.turn()


def test_a_searcher_generates_in_its_turn_alone(pair):
    pair.turn()
    assert pair.generated == 0 and pair.keeper.alone()
    awake(pair)
    generated = pair.generated
    assert not pair.keeper.alone()
    pair.keeper.take_turn()
    assert not pair.keeper.alone(), "it has not said so"
    until(lambda: not pair.gate.open)
    pair.turn()
    assert pair.keeper.alone()
    pair.turn()
    assert pair.generated == generated > 0


def test_a_start_is_a_turn_and_can_be_told_from_others(pair):
    pair.turn()
    pair.keeper.wake()
    until(lambda: pair.gate.open)
    pair.turn()
    assert not pair.keeper.alone() and pair.keeper.state == "starting"
    pair.turn()
    assert not pair.keeper.alone() and pair.keeper.state == "awake"


def test_a_turn_is_given_once(pair):
    awake(pair)
    for _ in range(3):
        pair.keeper.wake()
    pair.keeper.take_turn()
    pair.keeper.take_turn()
    until(lambda: not pair.gate.open)
    pair.turn()
    assert pair.keeper.alone(), "one answer is enough"


def test_each_end_notices_that_the_other_has_gone(pair):
    awake(pair)
    pair.keeper.close()
    assert pair.gone.wait(SOON)
    pair.turn()  # and says what nobody hears
    assert not pair.keeper.alone(), "what it said last still counts"


@given(st.lists(st.sampled_from(["wake", "take_turn", "turn", "turn", "wait"]), max_size=30))
def test_whoever_is_told_to_be_alone_is_until_it_gives_a_turn(steps):
    pair = Pair()
    try:
        alone_since: int | None = None
        for step in steps:
            if step == "turn":
                pair.turn()
            elif step == "wake":
                pair.keeper.wake()
                alone_since = None
            elif step == "take_turn":
                pair.keeper.take_turn()
            else:
                time.sleep(0.0005)  # what was sent arrives, or not
            if alone_since is None and step != "wake" and pair.keeper.alone():
                alone_since = pair.generated
            assert alone_since is None or pair.generated == alone_since
    finally:
        pair.close()
