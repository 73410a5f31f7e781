"""Offline replay of a tiny run whose live settings changed on the way, or of more steps than it took."""

import threading
import time

import pytest
from support.tiny_run import TinyRun

from tba.cli import main
from tba.contracts.errors import UserError
from tba.trainer.loop import Terminated
from tba.trainer.replay import replay, weights_that_differ

STEPS = 3
HANG = 60.0  # seconds after which a trainer that does not get to its wait has failed


def set_buffer(run: TinyRun, **limits) -> None:
    """Live limits of the buffer from now on."""
    run.live = run.live.model_copy(update={"buffer": run.live.buffer.model_copy(update=limits)})


def stop_in_a_wait(run: TinyRun, *, step: int) -> None:
    """Train up to `step` on one shard, wait there for want of rows, end by SIGTERM."""
    trainer = run.trainer()
    run.put_shard(0)
    thread = threading.Thread(target=lambda: pytest.raises(Terminated, trainer.run))
    thread.start()
    deadline = time.monotonic() + HANG
    while trainer.tracker.state != "WaitingForData" or trainer.tracker.trajectories < 4:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    run.stop.set()
    thread.join(HANG)
    assert run.ready.learner.step == step


def changed_run(folder, *, step: int, before: dict, after: dict) -> TinyRun:
    """A complete run that waited at `step` under limits `before` and was resumed with `after`."""
    run = TinyRun(folder, min_initial=0)
    set_buffer(run, **before)
    stop_in_a_wait(run, step=step)
    set_buffer(run, **after)
    run.trainer().run()
    return run


@pytest.fixture(scope="module")
def repaced(tmp_path_factory):
    """Two rows in for one trained at first; then no limit."""
    folder = tmp_path_factory.mktemp("repaced")
    return changed_run(folder, step=0, before={"max_replay_ratio": 0.5}, after={"max_replay_ratio": None})


def replay_command(run: TinyRun, *options: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["replay", run.uri, *options])
    return int(caught.value.code or 0)


def test_a_limit_on_the_pace_that_was_raised_during_the_run_does_not_change_its_replay(repaced):
    assert weights_that_differ(repaced.ready.store, replay(repaced.ready.store)) == []


def test_steps_that_the_run_never_took_are_refused_before_anything_is_trained(repaced, tmp_path, capsys):
    assert replay_command(repaced, "--steps", f"{STEPS + 1}", "-o", str(tmp_path / "model")) == 64
    told = capsys.readouterr()
    assert told.out == "" and not (tmp_path / "model").exists()
    assert f"has {STEPS} steps up to its newest checkpoint, got --steps {STEPS + 1}: " in told.err


def test_all_steps_of_a_run_and_fewer_can_be_asked_for(repaced, capsys):
    assert [replay_command(repaced, "--steps", f"{n}") for n in (STEPS, STEPS - 1)] == [0, 0]
    equal, fewer = capsys.readouterr().out.splitlines()
    assert equal == f"replayed {STEPS} steps; weights and checkpoint equal bit for bit"
    assert fewer.startswith(f"replayed {STEPS - 1} steps; ") and fewer.endswith("nothing to compare")


def test_a_batch_that_the_first_settings_forbid_ends_the_replay_with_what_can_still_be_replayed(tmp_path):
    strict = {"max_policy_lag": 0, "max_replay_lag": 0}
    run = changed_run(tmp_path, step=1, before=strict, after=dict.fromkeys(strict))
    with pytest.raises(UserError, match=r"step 2 of the run .*maxPolicyLag.* are not recorded: .* --steps 1$"):
        replay(run.ready.store)
    assert replay(run.ready.store, steps=1).step == 1


def test_weights_that_differ_are_told_with_the_settings_whose_change_would_explain_it(tmp_path, capsys):
    strict = {"max_policy_lag": 0, "max_replay_ratio": 1.0}
    run = changed_run(tmp_path, step=1, before=strict, after=dict.fromkeys(strict))
    capsys.readouterr()  # the trainer's log
    assert replay_command(run) == 1
    verdict, reason = capsys.readouterr().out.splitlines()
    assert "weights and checkpoint differ in" in verdict
    assert "buffer.maxPolicyLag" in reason and "changes are not recorded" in reason
