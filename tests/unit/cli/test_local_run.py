"""`tba run` around a stand-in for trainer and searchers: real processes, a real local store, synthetic history."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.jobs import smallest
from support.synthetic_run import START, latest

from tba.cli.local_plan import plan
from tba.cli.local_run import LocalRun, _stop_signals
from tba.cli.view import plain
from tba.contracts.errors import UserError
from tba.contracts.runfile import read_live_config, read_run_file
from tba.report.history import History
from tba.report.summary import summarise

TESTS = Path(__file__).parents[2]
STAND_IN = f"""
import sys, signal, time
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent / "workloads")!r}]
role, args = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if role == "searcher":
    while True:
        time.sleep(0.05)
from support.synthetic_run import latest, log_object, run_record, whole_run
from tba.contracts import keys
from tba.contracts.runfile import read_run_file
from tba.store import open_store
from pathlib import Path
store = open_store(args["--storage"])
if STATE and not list(store.list_after(keys.METRICS)):
    run = read_run_file(Path(args["--config"]))
    store.put_once(keys.RUN, run_record().model_copy(update={{"owner": run.owner, "config": run.config}}).to_json())
    store.put_once(*log_object(1, 0, whole_run(120)))
    store.cas(keys.LATEST, latest(state=STATE).to_json(), None)
print(LAST_WORDS, file=sys.stderr)
while HANG:
    time.sleep(0.05)
sys.exit(CODE)
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(smallest(runPolicy={"backoffLimit": 0})))
    return path


def planned(job_file, *, code=0, state: str | None = "Complete", last_words="", hang=False, storage="local"):
    """`state`: of the run that the trainer makes; null: it makes none."""
    script = job_file.parent / "stand_in.py"
    values = {"STATE": state, "LAST_WORDS": last_words, "CODE": code, "HANG": hang}
    script.write_text("".join(f"{k} = {v!r}\n" for k, v in values.items()) + STAND_IN)
    made = plan(
        job_file,
        overrides=[],
        searchers=2,
        storage=storage,
        run_dir=job_file.parent / "run",
        can_run_vllm=lambda: False,
    )
    return dataclasses.replace(made, command=(sys.executable, str(script)))


def test_a_run_ends_with_summary_report_and_the_result_as_json(job_file, capfd):
    assert LocalRun(planned(job_file), as_json=True).run() == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    directory = job_file.parent / "run"
    assert (result["state"], result["step"], result["exitCode"]) == ("Complete", 120, 0)
    assert Path(result["report"]).read_text().count("<svg") == 16
    for part in (
        "trainer started, pid",
        "searcher-1 started, pid",
        "staleness of trained rows",
        "21 versions",
        "report: ",
    ):
        assert part in err
    assert read_run_file(directory / "config").owner == "default/gsm8k"
    assert read_live_config(directory / "config").storage.uri == f"file://{directory}/store"
    assert set(json.loads((directory / "processes.json").read_text())) <= {"trainer", "searcher-0", "searcher-1"}


def test_a_user_error_of_the_trainer_is_shown_and_is_the_exit_code(job_file, capfd):
    assert LocalRun(planned(job_file, code=64, state="Running", last_words="error: spec.x: got 1; set 2")).run() == 64
    assert "error: spec.x: got 1; set 2" in capfd.readouterr().err


def test_a_second_call_says_that_it_resumes(job_file, capfd):
    LocalRun(planned(job_file, code=64, state="Running")).run()
    capfd.readouterr()
    LocalRun(planned(job_file, code=64, state="Running")).run()
    assert "resumes: the store holds this run at step 120 (Running)" in capfd.readouterr().out


def test_prompts_that_were_written_after_the_run_began_are_told_to_be_ignored(job_file, tmp_path, capfd):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "1", "answer": "1"}')
    task = {"prompts": {"uri": f"file://{prompts}"}, "reward": {"name": "fake"}}
    job_file.write_text(yaml.safe_dump(smallest(runPolicy={"backoffLimit": 0}, task=task)))
    told = []
    for written in (START - 60, START - 60, START + 60):
        os.utime(prompts, (written, written))
        LocalRun(planned(job_file, code=64, state="Running")).run()
        told.append(f"warning: {prompts} was written after this run began" in capfd.readouterr().out)
    assert told == [False, False, True]


def test_a_run_that_has_begun_goes_on_without_the_file_of_its_prompts(job_file, tmp_path, capfd):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "1", "answer": "1"}')
    task = {"prompts": {"uri": f"file://{prompts}"}, "reward": {"name": "fake"}}
    job_file.write_text(yaml.safe_dump(smallest(runPolicy={"backoffLimit": 0}, task=task)))
    LocalRun(planned(job_file, code=64, state="Running")).run()
    prompts.unlink()
    capfd.readouterr()
    LocalRun(planned(job_file, code=64, state="Running")).run()
    assert "resumes: the store holds this run at step 120 (Running)" in capfd.readouterr().out
    shutil.rmtree(job_file.parent / "run" / "store")
    with pytest.raises(UserError, match=f"no such file or directory, got file://{prompts}: make it"):
        LocalRun(planned(job_file)).run()
    assert "started, pid" not in capfd.readouterr().err


def test_another_jobs_run_is_refused_before_anything_is_started(job_file, capfd):
    LocalRun(planned(job_file, code=64, state="Running")).run()
    capfd.readouterr()
    other = yaml.safe_load(job_file.read_text())
    other["metadata"]["name"] = "other"
    job_file.write_text(yaml.safe_dump(other))
    with pytest.raises(UserError, match=r"holds a run of job default/gsm8k, this is default/other"):
        LocalRun(planned(job_file)).run()
    assert "started, pid" not in capfd.readouterr().err


def test_a_directory_whose_run_is_stored_elsewhere_is_refused_and_keeps_its_record(job_file):
    LocalRun(planned(job_file, code=64, state="Running")).run()
    record = job_file.parent / "run" / "storage.json"
    before = record.read_bytes()
    made = planned(job_file, storage=f"file://{job_file.parent / 'elsewhere'}")
    with pytest.raises(UserError, match=r"holds a run that is stored at file://.*/run/store, got file://.*/elsewhere"):
        LocalRun(made).run()
    assert record.read_bytes() == before


def test_a_directory_in_which_no_run_has_begun_may_be_used_with_another_storage(job_file):
    assert LocalRun(planned(job_file, code=64, state=None)).run() == 64
    assert LocalRun(planned(job_file, storage=f"file://{job_file.parent / 'elsewhere'}")).run() == 0


def test_a_directory_whose_record_was_cut_short_is_refused_with_the_remedy(job_file):
    record = job_file.parent / "run" / "storage.json"
    record.parent.mkdir()
    record.write_bytes(b"")
    with pytest.raises(UserError, match=r"storage\.json names no storage any more: .* Delete it; `tba run` with"):
        LocalRun(planned(job_file)).run()
    record.unlink()
    assert LocalRun(planned(job_file)).run() == 0


def test_a_run_that_cannot_be_read_says_so_in_its_line_and_a_silent_trainer_is_starting(job_file):
    run, history = LocalRun(planned(job_file)), History(latest=latest(step=7))
    feed = SimpleNamespace(progress=None, problem="KeyError: 'x'")

    def line():
        return plain(run._as_seen_here(summarise(history, 0.0), feed, stopping=False))

    assert "stale, cannot read the run: KeyError: 'x'" in line()
    feed.problem = ""
    assert "step 7/700 · Starting · the trainer loads model and prompts" in line()


def test_a_stop_signal_is_only_noted_by_its_handler():
    with _stop_signals() as received:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_cleanly_and_says_how_to_resume(job_file, signum, code):
    made = planned(job_file, state="Running", hang=True)
    program = (
        "import dataclasses, sys; from pathlib import Path; from tba.cli.local_plan import plan\n"
        "from tba.cli.local_run import LocalRun\n"
        f"made = plan(Path({str(job_file)!r}), overrides=[], searchers=1, storage='local', "
        f"run_dir=Path({str(made.directory)!r}), can_run_vllm=lambda: False)\n"
        f"sys.exit(LocalRun(dataclasses.replace(made, command={made.command!r})).run())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "workloads")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "step 120/700" in line and process.poll() is None and signum:
                process.send_signal(signum)
                signum = None
        assert process.wait(30) == code
    text = "".join(lines)
    assert "stopping: the trainer writes a checkpoint" in text
    assert "the same command (without --fresh) resumes" in text
