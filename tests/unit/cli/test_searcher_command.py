from pathlib import Path

import pytest

from tba.cli import main
from tba.searcher import main as searcher


@pytest.fixture
def options(monkeypatch):
    """Options of the searchers that were started instead of starting them."""
    seen = []
    monkeypatch.setattr(searcher, "run_searcher", lambda given: seen.append(given) or 0)
    return seen


def start(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["searcher", "--storage", "s3://b/run", "--name", "searcher-0", *arguments])
    assert caught.value.code == 0


def test_a_searcher_is_told_its_grace_its_spool_and_when_to_end(options, monkeypatch):
    start("--grace-seconds", "12.5", "--spool-dir", "spool", "--exit-when-done")
    monkeypatch.setenv("TBA_GRACE_SECONDS", "30")
    monkeypatch.setenv("TBA_SPOOL_DIR", "mounted")
    start()
    found = [(o.grace_seconds, o.spool_dir, o.exit_when_done) for o in options]
    assert found == [(12.5, Path("spool"), True), (30.0, Path("mounted"), False)]


def test_a_searcher_told_nothing_ends_below_the_grace_of_a_pod(options):
    start()
    assert options[0].grace_seconds == searcher.DEFAULT_GRACE_SECONDS < 60


def test_a_name_that_no_key_may_hold_is_refused_at_once(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["searcher", "--storage", "file:///nowhere/run", "--name", "BAD_name"])
    assert caught.value.code == 64
    assert "--name must be lower-case letters" in capsys.readouterr().err
