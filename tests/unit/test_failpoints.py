import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tba import failpoints
from tba.failpoints import Failpoint, configure, failpoint

SOURCE = Path(failpoints.__file__).parents[1]


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    configure("")


def run_passing_twice(spec):
    code = "failpoint('a.b'); print('first', flush=True); failpoint('a.b'); print('second')"
    code = f"from tba.failpoints import failpoint; {code}"
    environment = {**os.environ, "TBA_FAILPOINTS": spec, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def test_a_process_is_killed_at_the_nth_passage():
    ended = run_passing_twice("a.b=kill:2")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "first\n")


def test_exit_leaves_with_status_1_and_an_unarmed_point_does_nothing():
    assert run_passing_twice("a.b=exit").returncode == 1
    assert run_passing_twice("").stdout == run_passing_twice("other=kill").stdout == "first\nsecond\n"


def test_raise_fires_once_at_its_passage():
    configure("x=raise:2, y=raise")
    failpoint("x")
    with pytest.raises(Failpoint, match="failpoint x"):
        failpoint("x")
    failpoint("x")
    with pytest.raises(Failpoint, match="failpoint y"):
        failpoint("y")


@pytest.mark.parametrize("spec", ["x", "x=boom", "=kill", "x=kill:0", "x=kill:-1", "x=kill:a"])
def test_a_malformed_entry_is_refused(spec):
    with pytest.raises(ValueError, match="name=kill"):
        configure(spec)
