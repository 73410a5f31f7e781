"""The single-slot executor: one task at a time, errors come back, storage is tried again until it is given up."""

import threading
import time

import pytest

from tba.contracts.errors import Fenced, StoreUnavailable
from tba.store import AccessDenied
from tba.trainer.background import Background

HANG = 10.0  # seconds after which a test that waits for a thread has failed


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.after_read = lambda: None

    def __call__(self) -> float:
        now = self.now
        self.after_read()
        return now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def background(give_up_seconds: float = 60.0, clock: Clock | None = None) -> Background:
    clock = clock or Clock()
    return Background("test", give_up_seconds=give_up_seconds, clock=clock, sleep=clock.sleep)


def test_second_task_starts_only_when_the_first_has_ended():
    single, release, order = background(), threading.Event(), []

    def first():
        assert release.wait(HANG)
        order.append("first")

    assert single.submit(first) == 0.0
    assert single.busy
    assert not single.join(0.001)
    submitter = threading.Thread(target=lambda: single.submit(lambda: order.append("second")))
    submitter.start()
    submitter.join(0.005)
    assert submitter.is_alive() and order == []
    release.set()
    submitter.join(HANG)
    assert single.join(HANG)
    assert order == ["first", "second"]
    assert not single.busy


def test_submit_says_how_long_it_waited_for_the_task_before():
    clock = Clock()
    single = background(clock=clock)
    release = threading.Event()

    def slow():
        assert release.wait(HANG)
        clock.now += 7.0

    single.submit(slow)
    clock.after_read = release.set  # the first task ends once the second submit has looked at the clock
    assert single.submit(lambda: None) == 7.0
    single.join()


@pytest.mark.parametrize("collect", ["join", "submit", "check"])
def test_error_of_a_task_is_raised_once_where_the_caller_looks_next(collect):
    single, ran = background(), []

    def failing():
        raise Fenced("a newer trainer")

    single.submit(failing)
    while single.busy:
        time.sleep(0)
    with pytest.raises(Fenced, match="newer trainer"):
        if collect == "submit":
            single.submit(lambda: ran.append(1))
        else:
            getattr(single, collect)()
    assert ran == [], "a task must not start on top of an error nobody has seen"
    single.check()
    single.submit(lambda: ran.append(2))
    assert single.join(HANG)
    assert ran == [2]


def test_check_leaves_the_error_of_a_task_that_still_runs_alone():
    single, told, release = background(), threading.Event(), threading.Event()

    def failing():
        single._error = Fenced("told, but the thread has not ended")
        told.set()
        assert release.wait(HANG)

    single.submit(failing)
    assert told.wait(HANG)
    single.check()
    release.set()
    with pytest.raises(Fenced):
        single.join(HANG)


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), AccessDenied("credentials rotate")])
def test_storage_failure_is_tried_again_with_visible_waiting_until_it_answers(error):
    clock = Clock()
    single, seen = background(clock=clock), []

    def task():
        seen.append(single.outage.since)
        if len(seen) < 4:
            raise error

    clock.now = 3.0
    single.submit(task)
    assert single.join(HANG)
    assert seen == [None, 3.0, 3.0, 3.0]
    assert single.outage.since is None
    assert len(clock.slept) == 3 and clock.slept == sorted(clock.slept) and clock.slept[0] > 0


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), AccessDenied("no answer")])
def test_storage_is_given_up_only_after_the_limit(error):
    clock = Clock()
    single, tries = background(20.0, clock), []

    def task():
        tries.append(clock.now)
        raise error

    single.submit(task)
    with pytest.raises(type(error), match="no answer"):
        single.join()
    assert tries[-1] > 20.0 >= tries[-2]
    assert max(clock.slept) <= 5.0
    assert single.outage.since is None


def test_any_other_error_is_not_tried_again():
    single, tries = background(), []

    def task():
        tries.append(1)
        raise ZeroDivisionError

    single.submit(task)
    with pytest.raises(ZeroDivisionError):
        single.join()
    assert tries == [1]


def test_a_closed_background_tries_nothing_again_and_its_thread_ends():
    single, tries = Background("test", give_up_seconds=60.0), []

    def failing():
        tries.append(1)
        raise StoreUnavailable("no answer")

    single.submit(failing)
    while single.outage.since is None:
        time.sleep(0.001)
    single.close(HANG)
    assert not single.busy
    assert tries == [1]
