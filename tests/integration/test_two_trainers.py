"""At most one trainer can publish; a zombie is fenced, and a rollback leaves no trace in what counts."""

import fcntl
import signal
import subprocess
from pathlib import Path

import pytest
from support.processes import cluster, job_for

from tba.contracts.job import TBAJob
from tba.contracts.keys import CheckpointKey, WeightsKey
from tba.contracts.records import RunState
from tba.report.history import read_history


def stop_beside_the_lock(process: subprocess.Popen[bytes], store: Path) -> None:
    """Stop it while it does not hold the directory's lock, which nobody else could take then. That is told to people
    (`find a stopped process`), and no subject here: the commit that was just seen may still be within its hold."""
    with (store / ".tba" / "cas.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process.send_signal(signal.SIGSTOP)


@pytest.fixture(scope="module")
def taken_over(tmp_path_factory):
    """A run and its two trainers, the older of which stood still until the newer had published."""
    root = tmp_path_factory.mktemp("two")
    job = job_for(root, f"file://{root}/store", objective={"totalSteps": 100000})
    with cluster(root, job) as run:
        run.searcher()
        old = run.trainer()
        run.wait_for(lambda latest: latest.version >= 4)
        stop_beside_the_lock(old, root / "store")
        new = run.trainer()
        run.wait_for(lambda latest: latest.epoch == 2 and WeightsKey.parse(latest.manifest).epoch == 2)
        old.send_signal(signal.SIGCONT)
        yield run, old, new


def test_the_older_of_two_trainers_ends_with_code_3_and_publishes_nothing_more(taken_over):
    run, old, new = taken_over
    assert old.wait(60) == 3, run.tail()
    assert "a newer trainer took over" in run.log_of(old)
    version = run.latest().version
    seen = run.wait_for(lambda latest: latest.version >= version + 6)
    assert seen.epoch == 2 and WeightsKey.parse(seen.manifest).epoch == 2
    assert new.poll() is None


def test_a_trainer_that_is_told_to_stop_writes_a_checkpoint_of_that_very_step(taken_over):
    run, _, trainer = taken_over
    assert run.stop(trainer) == [143], run.tail()
    history = read_history(run.store)
    assert CheckpointKey.parse(run.latest().checkpoint).step == history.steps[-1].step


def test_a_resumed_trainer_goes_on_from_its_checkpoint_and_searchers_follow(tmp_path):
    job = job_for(
        tmp_path,
        f"file://{tmp_path}/store",
        objective={"totalSteps": 40},
        storage={"checkpoints": {"everySteps": 15}},
        buffer={"maxReplayRatio": 2.0},
    )
    with cluster(tmp_path, job) as run:
        run.searcher()
        # Publishes 22 and 24 lie behind checkpoint 15: the future to be discarded.
        assert run.trainer("commit.after_cas=kill:16").wait(120) == -signal.SIGKILL
        crashed = run.latest()
        resume_step = CheckpointKey.parse(crashed.checkpoint).step
        assert crashed.version > resume_step
        assert run.trainer().wait(120) == 0, run.tail()
        assert run.latest().state is RunState.COMPLETE
        history = read_history(run.store)
        assert [s.step for s in history.steps] == list(range(1, 41))
        assert all(lag >= 0 for s in history.steps for lag in s.staleness)
        assert {s.epoch for s in history.steps if s.step > resume_step} == {2}
        assert any(e.event == "resumed" and e.step == resume_step for e in history.events)


def three_steps(root: Path, **objective) -> TBAJob:
    return job_for(root, f"file://{root}/store", objective={"totalSteps": 3, **objective})


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    """The folder of `three_steps` that are done."""
    root = tmp_path_factory.mktemp("complete")
    with cluster(root, three_steps(root)) as run:
        run.searcher()
        assert run.trainer().wait(60) == 0, run.tail()
    return root


def test_another_job_on_the_same_prefix_is_refused_with_the_remedy(complete, trainer_here, capsys):
    job = three_steps(complete)
    other = job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": "other"})})
    with cluster(complete, other) as run:
        assert trainer_here(run) == 64
    told = capsys.readouterr().err
    assert "holds a run of job default/tiny, this is default/other" in told and "adopt" in told


def test_a_changed_objective_is_refused_on_resume_and_names_the_field(complete, trainer_here, capsys):
    with cluster(complete, three_steps(complete, beta=0.2)) as run:
        assert trainer_here(run) == 64
    assert "objective.beta was 0.05, is now 0.2" in capsys.readouterr().err


def test_a_complete_run_stays_complete(complete, trainer_here):
    with cluster(complete, three_steps(complete)) as run:
        before = run.latest()
        assert before.state is RunState.COMPLETE
        assert trainer_here(run) == 0
        assert run.latest() == before


def test_a_job_with_too_few_prompts_is_refused_before_it_leaves_a_run_that_forbids_the_correction(
    tmp_path, trainer_here, capsys
):
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"promptsPerBatch": 100_000})
    with cluster(tmp_path, job) as run:
        assert trainer_here(run) == 64
    assert "promptsPerBatch (P) must be <= the number of prompts" in capsys.readouterr().err
    assert not (tmp_path / "store/run.json").exists()
