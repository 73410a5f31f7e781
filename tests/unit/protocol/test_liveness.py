"""Which searcher processes count as at work."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.protocol.liveness import ALIVE_SECONDS, searchers_alive


@dataclass(frozen=True)
class Process:
    searcher: str
    first_seen: float
    last_seen: float


def spans(names=("searcher-0", "searcher-1")):
    times = st.tuples(st.integers(0, 200), st.integers(0, 200)).map(sorted)
    return st.lists(st.builds(lambda name, t: Process(name, *map(float, t)), st.sampled_from(names), times), max_size=8)


def test_a_searcher_that_was_restarted_twice_counts_once():
    restarts = [Process("searcher-0", 0, 10), Process("searcher-0", 20, 30), Process("searcher-0", 40, 41)]
    assert searchers_alive(restarts, 42) == 1
    assert searchers_alive([*restarts, Process("searcher-1", 0, 40)], 42) == 2


def test_two_processes_that_deliver_side_by_side_under_one_name_are_both_at_work():
    assert searchers_alive([Process("s", 0, 41), Process("s", 5, 40)], 42) == 2
    assert searchers_alive([Process("s", 7, 7), Process("s", 7, 7)], 42) == 2


@pytest.mark.parametrize(("age", "counted"), [(ALIVE_SECONDS, 1), (ALIVE_SECONDS + 1, 0)])
def test_a_silent_process_is_not_counted(age, counted):
    assert searchers_alive([Process("s", 0, 100)], 100 + age) == counted


def test_a_new_process_that_is_silent_does_not_bring_back_the_one_it_replaced():
    assert searchers_alive([Process("s", 0, 10), Process("s", 20, 30)], 30 + ALIVE_SECONDS + 1) == 0


@given(spans())
def test_no_more_are_at_work_than_were_heard_of_and_of_each_name_at_least_the_newest(processes):
    now = 200.0
    recent = [p for p in processes if now - p.last_seen <= ALIVE_SECONDS]
    newest = {p.searcher: p for p in sorted(processes, key=lambda p: p.first_seen)}
    least = sum(p in recent for p in newest.values())
    assert least <= searchers_alive(processes, now) <= len(recent)


@given(spans(names=("a",)), spans(names=("b",)))
def test_names_do_not_touch_each_other(one, other):
    assert searchers_alive(one + other, 200) == searchers_alive(one, 200) + searchers_alive(other, 200)
