import os
import signal
import sys
import time

import pytest

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
