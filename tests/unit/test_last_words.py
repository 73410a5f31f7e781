"""The termination message of a container: written where the environment says, and nowhere else."""

import json

import pytest
from support.progress import a_progress

from tba import last_words
from tba.contracts.history import Alert
from tba.contracts.termination import MAX_MESSAGE_CHARS, Termination, read_termination


@pytest.fixture(autouse=True)
def _no_source(monkeypatch):
    monkeypatch.setattr(last_words, "_sources", [])


def test_nothing_is_written_where_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.delenv("TBA_TERMINATION_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    last_words.leave(64, "x")
    assert list(tmp_path.iterdir()) == []


def test_code_error_and_the_newest_progress_are_left(tmp_path, monkeypatch):
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TBA_TERMINATION_PATH", str(path))
    steps = iter((7, 8))
    last_words.report_progress(lambda: a_progress(step=next(steps)))
    last_words.leave(2, "storage did not serve get x")
    found = read_termination(path.read_text())
    assert found is not None and found.progress is not None
    assert (found.exit_code, found.message, found.progress.step) == (2, "storage did not serve get x", 7)


def test_an_error_that_fills_the_message_leaves_room_for_the_progress(tmp_path, monkeypatch):
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TBA_TERMINATION_PATH", str(path))
    alerts = [Alert(reason="SyncStalled", message="x" * 500)]
    last_words.report_progress(lambda: a_progress(state="Failed", detail="e" * 3000, alerts=alerts))
    last_words.leave(64, "e" * 3000)
    found = read_termination(path.read_text())
    assert found is not None and found.progress is not None and found.progress.state == "Failed"
    assert found.message == "e" * MAX_MESSAGE_CHARS


def test_a_long_error_is_cut_and_still_readable(tmp_path, monkeypatch):
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TBA_TERMINATION_PATH", str(path))
    last_words.report_progress(a_progress)
    last_words.leave(64, "ü" * 5000)
    assert path.stat().st_size <= 4096
    found = read_termination(path.read_text())
    assert found is not None and found.message.startswith("üü")


def test_the_last_words_of_a_newer_release_are_read_without_what_is_new_in_them():
    words = Termination(exit_code=2, message="m", progress=a_progress(step=7))
    newer = json.loads(words.to_json())
    newer["ofTheFuture"] = newer["progress"]["ofTheFuture"] = 1
    assert read_termination(json.dumps(newer)) == words


@pytest.mark.parametrize("text", ["", "Killed", "7", '{"event": "step_completed", "step": 3}', "[" * 5000])
def test_the_end_of_a_log_is_nobodys_last_words(text):
    assert read_termination(text) is None


def test_a_message_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TBA_TERMINATION_PATH", str(tmp_path / "none" / "file"))
    last_words.leave(0, "")
