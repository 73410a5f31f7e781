import subprocess
import sys
import threading

import pytest

from tba.snapshots.beside import Beside


def test_its_value_or_its_error_comes_back():
    assert Beside("t", lambda: 7).result() == 7
    failed = Beside("t", lambda: 1 // 0)
    failed.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()


def test_it_runs_while_its_caller_goes_on():
    go = threading.Event()
    call = Beside("t", lambda: go.wait(10.0))
    call.wait(0.01)
    go.set()
    assert call.result()


def test_an_ending_process_does_not_wait_for_it():
    code = "import threading; from tba.snapshots.beside import Beside; Beside('t', threading.Event().wait)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "workloads"}, check=True, timeout=60)
