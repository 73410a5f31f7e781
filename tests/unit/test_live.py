import pytest
from structlog.testing import capture_logs

from tba.contracts.config import Buffer, LiveConfig, Storage, Sync
from tba.contracts.errors import UserError
from tba.contracts.runfile import LIVE_FILE
from tba.live import LiveSettings


def config(interval: float) -> LiveConfig:
    return LiveConfig(storage=Storage(uri="file:///x"), sync=Sync(poll_interval_seconds=interval))


def test_a_changed_file_is_followed_and_a_broken_one_changes_nothing(tmp_path):
    now = [0.0]
    file = tmp_path / LIVE_FILE
    file.write_bytes(config(1.0).to_json())
    live = LiveSettings(tmp_path, config(9.0), clock=lambda: now[0])
    assert live().sync.poll_interval_seconds == 1.0
    latin = config(2.5).to_json().replace(b"/x", "/Läufe".encode("latin-1"))
    for text, expected in ((config(2.0).to_json(), 2.0), (b"{", 2.0), (latin, 2.0), (config(3.0).to_json(), 3.0)):
        new = tmp_path / "new"
        new.write_bytes(text)
        new.replace(file)
        assert live().sync.poll_interval_seconds != 3.0  # not looked at within the second
        now[0] += 1.0
        assert live().sync.poll_interval_seconds == expected


def test_without_a_directory_the_defaults_hold():
    assert LiveSettings(None, config(9.0))().sync.poll_interval_seconds == 9.0


def test_a_file_that_is_broken_at_the_start_is_refused(tmp_path):
    with pytest.raises(UserError):
        LiveSettings(tmp_path, config(9.0))


def test_a_field_that_is_the_runs_for_good_is_refused_with_all_that_came_with_it(tmp_path):
    now = [0.0]
    file = tmp_path / LIVE_FILE
    file.write_bytes(config(1.0).to_json())
    live = LiveSettings(tmp_path, clock=lambda: now[0])
    with capture_logs() as logged:
        for buffer, taken in ((Buffer(sampling="Uniform"), False), (Buffer(max_policy_lag=3), True)):
            new = tmp_path / "new"
            new.write_bytes(config(2.0).model_copy(update={"buffer": buffer}).to_json())
            new.replace(file)
            now[0] += 1.0
            assert (live().sync.poll_interval_seconds == 2.0) is taken
    told = logged[0]["error"]
    assert "buffer.sampling is Reward for the life of the run, got Uniform" in told and "buffer.maxPolicyLag" in told
