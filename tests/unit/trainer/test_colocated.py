"""The trainer's own searcher as a process: shell scripts stand for it, and time is simulated."""

import os
import subprocess
import time

import pytest

from tba.contracts.config import ColocatedSearcher
from tba.trainer.colocated import (
    MAX_FAILURES,
    SLEEP_SECONDS,
    Colocated,
    child_environment,
    command,
    environment,
    nobody,
)

SOON = 20.0
QUIET = 'printf "asleep 0\\n" >&$TBA_GATE_FD; exec sleep 60'
"""Says that it sleeps, and nothing ever after."""


class Clock:
    """Each look moves it on by `step`."""

    def __init__(self) -> None:
        self.now = self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Host:
    def __init__(self, script: str, **settings) -> None:
        self.clock = Clock()
        self.settings = ColocatedSearcher(enabled=True, **settings)
        self.told: list[str] = []
        self.rooms = 0
        self.it = Colocated(["bash", "-c", script], lambda: self.settings, make_room=self.room, clock=self.clock)
        self.beats = 0
        self.stopping = False
        self.it.attach(tell=self.tell, beat=self.beat, stopping=lambda: self.stopping)

    def tell(self, event: str, detail: str) -> None:
        self.told.append(f"{event}: {detail}")

    def beat(self) -> None:
        self.beats += 1

    def room(self) -> None:
        self.rooms += 1

    def until(self, condition, *, advance=0.0) -> None:
        deadline = time.monotonic() + SOON
        while not condition() and time.monotonic() < deadline:
            self.clock.now += advance
            self.it.tick()
            time.sleep(0.002)
        assert condition()

    @property
    def state(self) -> str:
        keeper = self.it._keeper
        if keeper is None:
            return ""
        keeper.read()
        return keeper.state


@pytest.fixture
def host():
    made: list[Host] = []

    def start(script: str, **settings) -> Host:
        made.append(Host(script, **settings))
        return made[-1]

    yield start
    for one in made:
        one.it.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("enabled", ["auto", False])
def test_nothing_is_started_unless_it_is_enabled(host, enabled):
    run = host(QUIET)
    run.settings = ColocatedSearcher(enabled=enabled)
    run.it.tick()
    run.it.wake()
    run.it.sleep()
    assert run.it.pid is None and nobody().pid is None


def test_one_that_keeps_ending_is_told_and_given_up(host):
    run = host("exit 1")
    run.until(lambda: run.it.trouble, advance=1.0)
    assert len(run.told) == MAX_FAILURES and "code 1; it starts again" in run.told[0]
    assert f"{MAX_FAILURES} times in a row, last with code 1" in run.told[-1]
    run.clock.now += 1000
    run.it.tick()
    run.it.sleep()
    assert run.it.pid is None


def test_one_that_was_given_up_is_tried_again_with_other_settings(host):
    run = host("exit 1")
    run.until(lambda: run.it.trouble, advance=1.0)
    run.settings = ColocatedSearcher(enabled=True, memory_fraction=0.2)
    run.it.tick()
    assert run.it.pid is not None and not run.it.trouble
    run.until(lambda: run.it.trouble, advance=1.0)
    assert len(run.told) == 2 * MAX_FAILURES


def test_one_that_ended_with_the_run_is_not_started_again_with_other_settings(host):
    run = host("exit 0")
    run.it.tick()
    run.until(lambda: run.it.pid is None, advance=1.0)
    run.settings = ColocatedSearcher(enabled=True, memory_fraction=0.2)
    run.it.tick()
    assert run.it.pid is None


def test_storage_that_is_away_is_no_reason_to_give_up(host):
    run = host("exit 2")
    run.until(lambda: len(run.told) > MAX_FAILURES, advance=30.0)
    assert not run.it.trouble


def test_an_end_after_a_long_time_starts_the_count_again(host):
    run = host(QUIET)
    for _ in range(MAX_FAILURES + 1):
        run.until(lambda: run.it.pid is not None, advance=1.0)
        run.clock.now += 100
        os.kill(run.it.pid, 9)
        run.until(lambda: run.it.pid is None)
    assert not run.it.trouble and "SIGKILL" in run.told[-1]


def test_a_searcher_that_does_not_fall_asleep_is_killed_and_started_again(host):
    run = host(QUIET)
    run.until(lambda: run.state == "asleep")
    pid = run.it.pid
    run.it.sleep()
    assert run.it.pid == pid, "it sleeps, so nothing is awaited"
    run.it.wake()
    run.clock.step = SLEEP_SECONDS
    run.it.sleep()
    run.clock.step = 0.0
    assert run.it.pid is None and gone(pid) and run.beats
    run.until(lambda: run.it.pid not in (None, pid), advance=1.0)


def test_a_trainer_that_is_to_stop_waits_for_no_turn_to_end(host):
    run = host(QUIET)
    run.until(lambda: run.state == "asleep")
    pid, run.stopping = run.it.pid, True
    run.it.wake()
    run.it.sleep()
    assert gone(pid)


def test_one_that_has_ended_in_its_turn_is_not_awaited(host):
    run = host(QUIET)
    run.until(lambda: run.state == "asleep")
    run.it.wake()
    os.kill(run.it.pid, 9)
    run.it.sleep()
    assert run.it.pid is None


def test_changed_settings_start_another_and_disabling_ends_it(host):
    run = host(QUIET)
    run.it.tick()
    first = run.it.pid
    run.settings = ColocatedSearcher(enabled=True, memory_fraction=0.2)
    run.it.tick()
    assert run.it.pid not in (None, first) and gone(first)
    run.settings = ColocatedSearcher()
    run.it.tick()
    assert run.it.pid is None


def test_one_that_ignores_sigterm_is_killed(host, monkeypatch):
    monkeypatch.setattr("tba.trainer.colocated.GRACE_SECONDS", 0.05)
    run = host(f"trap '' TERM; {QUIET.replace('exec ', '')}; sleep 60")
    run.until(lambda: run.state == "asleep")
    pid = run.it.pid
    run.it.stop()
    run.it.close()
    assert gone(pid)
    run.it.tick()
    assert run.it.pid is None, "stopped for good"


def test_rows_are_looked_for_often_while_a_turn_lasts(host):
    run = host(QUIET)
    assert run.it.poll_seconds(2.0) == 2.0
    run.it.tick()
    run.it.wake()
    assert run.it.poll_seconds(2.0) < 0.5 and run.it.poll_seconds(0.01) == 0.01
    run.it.sleep()
    assert run.it.poll_seconds(2.0) == 2.0


def test_memory_that_the_trainer_does_not_use_is_given_back_before_the_engine_needs_it(host):
    run = host(QUIET)
    run.until(lambda: run.state == "asleep")
    run.it.wake()
    assert run.rooms == 1, "its engine has yet to start"


def test_the_searcher_gets_neither_tokens_nor_ports_nor_a_rank_of_the_trainer():
    kept = {"PATH": "/bin", "TBA_CREDENTIALS_DIR": "/c", "OMP_NUM_THREADS": "4", "TBA_TRACE": "/t"}
    left_out = dict.fromkeys(
        (
            "HF_TOKEN",
            "TBA_RENDEZVOUS_TOKEN",
            "TBA_PORT",
            "TBA_TERMINATION_PATH",
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "TORCHELASTIC_RUN_ID",
        ),
        "x",
    )
    assert environment(kept | left_out) == kept


def test_how_the_trainer_allocates_is_for_its_ranks_and_not_for_an_engine():
    own = {"PATH": "/bin", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_TOKEN": "x"}
    assert set(child_environment(own)) == {"PATH", "PYTORCH_ALLOC_CONF"}
    assert set(environment(own)) == {"PATH"}


def test_the_command_is_one_that_the_command_line_knows(tmp_path):
    argv = command(config_dir=tmp_path, storage="file:///x", threads=2)
    assert argv[argv.index("searcher") :][:1] == ["searcher"]
    done = subprocess.run([*argv, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "--exit-when-done" in done.stdout
