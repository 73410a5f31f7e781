import errno
import os
import signal

import pytest
import typer

from tba.cli import main
from tba.cli.exit import INTERRUPTED, TERMINATED, Terminated, ending_of, exit_code, sigterm_unwinds
from tba.contracts.errors import CorruptObject, Fenced, StoreUnavailable, UserError
from tba.contracts.termination import read_termination
from tba.store import NotFound


def raising(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 64), (StoreUnavailable("x"), 2), (Fenced("x"), 3), (CorruptObject("x"), 1),
        (RuntimeError("x"), 1), (KeyboardInterrupt(), INTERRUPTED), (Terminated(), TERMINATED), (typer.Exit(7), 7),
        (typer.Abort(), INTERRUPTED), (typer.BadParameter("x"), 64), (SystemExit(5), 5),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else str(v),
)  # fmt: skip
def test_every_ending_has_its_code(error, code, capsys):
    assert exit_code(raising(error)) == code


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (143, 143), ("text", 0)])
def test_a_returned_code_is_the_code(value, code):
    assert exit_code(lambda: value) == code


@pytest.mark.parametrize("kind", [UserError, StoreUnavailable, Fenced, CorruptObject, FloatingPointError])
def test_what_no_traceback_explains_is_told_without_a_traceback(kind, capsys):
    exit_code(raising(kind("spec.x: must be 1, got 2: set 1")))
    assert capsys.readouterr().err == "error: spec.x: must be 1, got 2: set 1\n"


def test_an_object_that_has_gone_is_told_by_its_address_without_a_traceback(capsys):
    assert exit_code(raising(NotFound("s3://b/p/run.json"))) == 1
    assert capsys.readouterr().err == (
        "error: s3://b/p/run.json has gone: a sweep or a person deleted it. Restore it if you can\n"
    )


def test_a_bug_shows_its_traceback(capsys):
    exit_code(raising(ZeroDivisionError("bug")))
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["statsu"], ["status"], ["status", "--nope", "x"], ["run", "j", "--searchers", "-1"]]
)
def test_a_wrong_command_line_is_a_user_error(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 64
    assert "Traceback" not in capsys.readouterr().err


def test_version_and_help_end_with_0(capsys):
    for arguments in (["--version"], ["--help"], ["run", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert "tba 0" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_full_or_unwritable_disk_is_told_with_its_remedy_and_no_traceback(number, capsys):
    def fail():
        raise OSError(number, os.strerror(number), "/some/where")

    assert exit_code(fail) == 1
    told = capsys.readouterr().err
    assert "/some/where" in told and "free some space" in told and "Traceback" not in told


def test_any_other_operating_system_error_is_a_bug_and_shows_its_traceback(capsys):
    def fail():
        raise OSError(errno.EBADF, "bad descriptor")

    assert exit_code(fail) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("spec.x: must be 1, got 2: set 1"), "spec.x: must be 1, got 2: set 1"),
        (StoreUnavailable("storage did not serve"), "storage did not serve"),
        (ZeroDivisionError("bug"), "ZeroDivisionError: bug"),
        (KeyboardInterrupt(), ""), (Terminated(), ""),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_an_ending_carries_the_error_as_it_was_told(error, message, capsys):
    assert ending_of(raising(error)).message == message


@pytest.mark.parametrize(("command", "left"), [("searcher", True), ("status", False)])
def test_only_what_runs_as_a_container_leaves_last_words_also_for_a_wrong_option(command, left, tmp_path, monkeypatch):
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TBA_TERMINATION_PATH", str(path))
    with pytest.raises(SystemExit) as caught:
        main([command, "--nope"])
    assert caught.value.code == 64 and path.exists() == left
    if left:
        found = read_termination(path.read_text())
        assert found is not None and found.exit_code == 64 and "--nope" in found.message


def test_sigterm_unwinds_a_container_that_has_no_shutdown_yet_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)

    def body():
        with sigterm_unwinds():
            os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(body) == TERMINATED
    assert signal.getsignal(signal.SIGTERM) == before
