import pytest
from support.jobs import smallest_job

from tba.contracts.errors import UserError
from tba.contracts.runfile import LIVE_FILE, RUN_FILE, read_live_config, read_run_file, write_config


def test_what_is_written_is_what_is_read(tmp_path):
    job = smallest_job(objective={"totalSteps": 3})
    write_config(tmp_path / "config", job, base_dir="/data")
    run = read_run_file(tmp_path / "config")
    assert (run.owner, run.name, run.base_dir) == ("default/gsm8k", "gsm8k", "/data")
    assert run.config == job.spec.run_config()
    assert read_live_config(tmp_path / "config") == job.spec.live_config()


def test_nothing_but_the_two_files_is_left(tmp_path):
    write_config(tmp_path, smallest_job())
    assert sorted(p.name for p in tmp_path.iterdir()) == [LIVE_FILE, RUN_FILE]


def test_a_missing_file_says_which_and_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"run\.json: cannot be read: No such file.*Pass the directory"):
        read_run_file(tmp_path)


def test_a_broken_file_names_the_field(tmp_path):
    write_config(tmp_path, smallest_job())
    path = tmp_path / LIVE_FILE
    path.write_text(path.read_text().replace('"intervalSteps": 2', '"intervalSteps": 0'))
    with pytest.raises(UserError, match=r"live\.json: 1 problem\n  sync\.intervalSteps: must be >= 1, got 0"):
        read_live_config(tmp_path)
