"""Commands and storage that does not answer."""

import socket

import pytest
import yaml
from support.jobs import smallest

from tba.cli import main
from tba.cli.waiting import ATTENDED, WaitTeller
from tba.store import RetryPolicy, Wait

IMPATIENT = RetryPolicy(budget_seconds=60, first_budget_seconds=0.5, base_delay_seconds=0.05)


@pytest.fixture
def closed(monkeypatch):
    """Endpoint at which nothing listens, and commands that find that out soon."""
    monkeypatch.setattr("tba.cli.target.ATTENDED", IMPATIENT)
    monkeypatch.setattr("tba.cli.waiting._SILENT_SECONDS", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.socket() as taken:  # bound and never listening
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


COMMANDS = [
    ["status", "--json"],
    ["watch"],
    ["report"],
    ["inspect", "shards", "--json"],
    ["inspect", "checkpoint"],
    ["pin", "5"],
    ["export", "--step", "0", "-o", "out"],
    ["storage", "check"],
    ["storage", "gc"],
    ["storage", "delete", "--yes"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_says_once_what_it_waits_for_and_ends_with_2(command, closed, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [w for w in command if not w.startswith("-")]
    name = words[:2] if command[0] in ("inspect", "storage") else words[:1]
    rest = command[len(name) :]
    with pytest.raises(SystemExit) as ended:
        main([*name, "s3://b/run", *rest, "--endpoint", closed])
    told = capsys.readouterr()
    waits = [line for line in told.err.splitlines() if line.startswith("waiting")]
    assert ended.value.code == 2 and told.out == ""
    assert waits == [f"waiting for storage at {closed}: Connection refused; giving up within 0 s; Ctrl-C ends it"]
    assert "(budget 0.5 s); last error: " in told.err and f"check that {closed} is up" in told.err


def test_a_local_run_starts_nothing_before_its_storage_has_answered(closed, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", closed)
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(smallest()))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(job), "--storage", "s3://b/run", "--run-dir", str(tmp_path / "run")])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert "waiting for storage at" in told.err and "started, pid" not in told.out + told.err


def wait(seconds: float) -> Wait:
    return Wait("http://s3", "Connection refused", seconds, 30.0 - seconds)


def test_short_waits_pass_in_silence_and_long_ones_are_told_rarely():
    now, said = [100.0], []
    teller = WaitTeller(say=said.append, clock=lambda: now[0])
    for seconds in (0.1, 1.0, 2.9):
        teller(wait(seconds))
    assert said == []
    for moment in range(100, 190, 2):
        now[0] = float(moment)
        teller(wait(3.5))
    assert len(said) == 3


def test_storage_that_never_answered_is_given_up_sooner_than_storage_that_did():
    assert ATTENDED.first_budget_seconds is not None and ATTENDED.first_budget_seconds < ATTENDED.budget_seconds
    assert ATTENDED.budget_seconds == RetryPolicy().budget_seconds, "a long export outlives what a trainer outlives"
    assert RetryPolicy().first_budget_seconds is None, "a pod may start before its storage"
