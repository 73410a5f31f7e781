"""Real processes: tiny shell programs that end, hang or obey as told."""

import os
import signal
import threading

import pytest

from tba.cli.supervisor import Program, RestartPolicy, Supervisor, describe

OBEY = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.02; done"
DEAF = "trap '' TERM; echo ready; while :; do sleep 0.02; done"
WAIT_SECONDS = 20.0


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Run:
    def __init__(self, folder, trainer, searchers=(), *, limit=2, grace=5.0):
        self.folder, self.clock, self.news, self.checkpoint = folder, Clock(), [], None
        self.pause = threading.Event()
        make = lambda name, script: Program(  # noqa: E731
            name, ["sh", "-c", script], folder / "logs" / f"{name}.log", {"COUNT": str(folder / name)}, grace
        )
        self.supervisor = Supervisor(
            make("trainer", trainer),
            [make(f"searcher-{i}", s) for i, s in enumerate(searchers)],
            policy=RestartPolicy(backoff_limit=limit),
            checkpoint=lambda: self.checkpoint,
            notify=self.news.append,
            clock=self.clock,
        )

    def until(self, condition, *, advance=0.0):
        """Tick until `condition(code)`; time advances by so much a tick."""
        for _ in range(int(WAIT_SECONDS / 0.005)):
            code = self.supervisor.tick()
            if condition(code):
                return code
            self.clock.now += advance
            self.pause.wait(0.005)
        raise AssertionError(f"waited too long; news: {self.news}")

    def until_end(self, advance=1.0):
        return self.until(lambda code: code is not None, advance=advance)

    def log(self, name):
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def start(tmp_path):
    runs = []

    def make(*args, **kwargs):
        run = Run(tmp_path, *args, **kwargs)
        runs.append(run)
        run.supervisor.start()
        return run

    yield make
    for run in runs:
        run.supervisor.kill()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def attempts(script):
    """A program that does `script` with $n the number of its attempt, from 1."""
    return f'echo x >> "$COUNT"; n=$(wc -l < "$COUNT"); {script}'


def test_searchers_are_stopped_when_the_trainer_is_done(start, tmp_path):
    run = start('while [ ! -e "$COUNT.done" ]; do sleep 0.02; done', [OBEY, OBEY])
    pids = run.supervisor.pids
    assert set(pids) == {"trainer", "searcher-0", "searcher-1"}
    run.until(lambda _: "ready" in run.log("searcher-0") and "ready" in run.log("searcher-1"))
    (tmp_path / "trainer.done").touch()
    assert run.until_end(advance=0.0) == 0
    assert not any(alive(pid) for pid in pids.values())
    assert run.supervisor.message is None


@pytest.mark.parametrize("code", [64, 3])
def test_an_error_that_cannot_pass_ends_the_run_with_its_message(start, code):
    run = start(
        f"echo '{{\"event\": \"x\"}}'; echo 'error: beta must be > 0, got -1'; echo '  set it'; exit {code}", [OBEY]
    )
    assert run.until_end() == code
    assert run.supervisor.message == "beta must be > 0, got -1\n  set it"
    assert run.supervisor.restarts["trainer"] == 0


def test_a_crashed_trainer_is_started_again_and_may_finish(start):
    run = start(attempts("test $n -ge 3 && exit 0; exit 1"), limit=2)
    assert run.until_end() == 0
    assert run.supervisor.restarts["trainer"] == 2


def test_a_trainer_without_a_new_checkpoint_is_given_up_after_the_limit(start):
    run = start("echo oh no; exit 1", limit=2)
    assert run.until_end() == 1
    assert run.supervisor.restarts["trainer"] == 2
    assert "3 times without a new checkpoint (backoffLimit 2)" in run.supervisor.message
    assert "oh no" in run.supervisor.message


def test_a_new_checkpoint_resets_the_count(start):
    run = start(attempts("test $n -ge 6 && exit 0; exit 1"), limit=1)

    def progress(code):
        run.checkpoint = f"checkpoints/{run.supervisor.restarts['trainer']}"
        return code is not None

    assert run.until(progress, advance=1.0) == 0
    assert run.supervisor.restarts["trainer"] == 5


def test_unavailable_storage_counts_only_until_it_once_worked(start, tmp_path):
    never = start("exit 2", limit=1)
    assert never.until_end() == 2
    (tmp_path / "trainer").unlink(missing_ok=True)
    once = start(attempts("test $n -ge 6 && exit 0; exit 2"), limit=1)
    once.checkpoint = "checkpoints/1"
    assert once.until_end() == 0


def test_a_trainer_that_was_told_to_end_by_somebody_else_is_started_again_uncounted(start):
    run = start(attempts("test $n -ge 5 && exit 0; exit 143"), limit=0)
    assert run.until_end() == 0


def test_a_killed_searcher_is_started_again_with_growing_waits(start):
    run = start(OBEY, ["kill -9 $$"])
    run.until(lambda _: run.supervisor.restarts["searcher-0"] >= 3, advance=0.5)
    waits = [line for line in run.news if "starts again" in line]
    assert [w.rpartition("in ")[2] for w in waits[:3]] == ["1 s", "2 s", "4 s"]
    assert "code 137 (SIGKILL)" in waits[0]


def test_a_searcher_with_a_user_error_ends_the_run(start):
    run = start(OBEY, ["echo 'error: no such reward'; exit 64"])
    run.until(lambda _: "ready" in run.log("trainer"))
    assert run.until_end(advance=0.0) == 64
    assert run.supervisor.message == "no such reward"


def test_a_stop_asks_every_process_and_ends_with_the_code_asked_for(start):
    run = start(OBEY, [OBEY])
    run.until(lambda _: "ready" in run.log("trainer") and "ready" in run.log("searcher-0"))
    run.supervisor.request_stop(130)
    assert run.supervisor.stopping
    assert run.until_end(advance=0.0) == 130


def test_a_process_that_does_not_end_within_its_grace_is_killed(start):
    run = start(DEAF, grace=5.0)
    run.until(lambda _: "ready" in run.log("trainer"))
    run.supervisor.request_stop(143)
    run.clock.now = 4.9
    assert run.supervisor.tick() is None
    assert run.supervisor.pids
    run.clock.now = 5.0
    assert run.until_end(advance=0.0) == 143
    assert run.news[-1] == "trainer killed: did not end within its grace"


@pytest.mark.parametrize(("code", "who"), [(130, "Ctrl-C"), (143, "SIGTERM")])
def test_a_second_stop_kills_at_once_and_says_what_did(start, code, who):
    run = start(DEAF, grace=1000.0)
    run.until(lambda _: "ready" in run.log("trainer"))
    run.supervisor.request_stop(130)
    run.supervisor.request_stop(code)
    assert run.until_end(advance=0.0) == 130
    assert run.news[-1] == f"trainer killed: {who} while it was stopping"


def test_a_stopped_process_still_obeys(start):
    run = start(OBEY)
    run.until(lambda _: "ready" in run.log("trainer"))
    os.kill(run.supervisor.pids["trainer"], signal.SIGSTOP)
    run.supervisor.request_stop(143)
    assert run.until_end(advance=0.0) == 143


def test_the_message_is_of_the_last_attempt_not_of_an_earlier_one(start):
    run = start(attempts("test $n -eq 1 && echo 'error: old' && exit 1; echo 'error: new'; exit 64"))
    assert run.until_end() == 64
    assert run.supervisor.message == "new"


@pytest.mark.parametrize(
    ("code", "text"),
    [(1, "code 1 (a crash)"), (137, "code 137 (SIGKILL)"), (143, "code 143 (SIGTERM)"), (77, "code 77")],
)
def test_codes_are_told_in_words(code, text):
    assert describe(code) == text
