import os
import signal
import sys
import threading
import time

import pytest

from tba.searcher.main import await_record
from tba.stop import StopFlag, stop_signals


@pytest.mark.timeout(20)
def test_the_flag_may_be_set_at_any_instruction_of_a_wait_in_the_same_thread():
    for line in range(1, 30):
        flag, passed = StopFlag(), 0

        def trace(frame, event, _argument):
            """Stands in for a signal: it runs in this thread, between two instructions of what it interrupts."""
            nonlocal passed
            passed += event == "line" and frame.f_code.co_name != "is_set"
            if passed == line:  # noqa: B023
                flag.set()  # noqa: B023
            return trace  # noqa: B023

        sys.settrace(trace)
        try:
            flag.wait(0.02)
        finally:
            sys.settrace(None)
        assert flag.is_set() == (passed >= line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_wait_soon_and_the_former_handler_comes_back(number):
    before = signal.getsignal(number)
    with stop_signals() as flag:
        assert not flag.wait(0.0)
        os.kill(os.getpid(), number)
        assert flag.wait(60.0)
    assert signal.getsignal(number) is before


def test_the_flag_remembers_when_it_was_first_set():
    flag = StopFlag()
    assert flag.since is None
    before = time.monotonic()
    flag.set()
    first = flag.since
    flag.set()
    assert flag.since == first and before <= first <= time.monotonic()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_at_once_what_is_interruptible_and_only_sets_the_flag_elsewhere(number):
    with stop_signals() as flag:
        with flag.interruptible():
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
            time.sleep(60)
            pytest.fail("the sleep was not interrupted")
        assert flag.is_set()
        os.kill(os.getpid(), number)
        time.sleep(0.01)  # nothing is raised here


@pytest.mark.timeout(20)
def test_a_searcher_that_waits_for_storage_ends_on_a_signal():
    class Silent:
        uri = "s3://b/run"

        def get(self, _key):
            time.sleep(60)

    with stop_signals() as flag:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert await_record(Silent(), flag, beat=lambda: None) is None
