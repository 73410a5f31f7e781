"""Offline replay of a tiny run whose live settings changed on the way, or of more steps than it took."""

import json
import re
import shutil
import threading
import time

import pytest
from support.tiny_run import TinyRun

from tba.cli import main
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import INGEST, RUN
from tba.contracts.records import IngestEntry
from tba.report.history import read_history
from tba.store import open_store
from tba.trainer.loop import Terminated
from tba.trainer.replay import replay, weights_that_differ

STEPS = 3
HANG = 60.0  # seconds after which a trainer that does not get to its wait has failed


def set_live(run: TinyRun, section: str, fields: dict) -> None:
    """Live settings from now on."""
    run.live = run.live.model_copy(update={section: getattr(run.live, section).model_copy(update=fields)})


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
    set_live(run, "buffer", before)
    stop_in_a_wait(run, step=step)
    set_live(run, "buffer", after)
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


@pytest.fixture(scope="module")
def loosened(tmp_path_factory):
    """A batch of step 2 that the first settings forbid."""
    strict = {"max_policy_lag": 0, "max_replay_lag": 0}
    folder = tmp_path_factory.mktemp("loosened")
    return changed_run(folder, step=1, before=strict, after=dict.fromkeys(strict))


def forget_changes(run: TinyRun, folder) -> str:
    """URI of a copy of the run whose ingest log knows no later settings."""
    shutil.copytree(run.uri.removeprefix("file://"), folder)
    found = 0
    for path in (folder / INGEST).rglob("*"):
        if path.is_file():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if IngestEntry.model_validate_json(line).live is None]
            path.write_bytes(b"".join(kept))
            found += len(lines) - len(kept)
    assert found
    return f"file://{folder}"


def test_settings_that_changed_during_the_run_change_at_the_same_step_of_its_replay(loosened, capsys):
    assert replay_command(loosened) == 0
    assert capsys.readouterr().out == f"replayed {STEPS} steps; weights and checkpoint equal bit for bit\n"


def test_a_change_of_settings_is_an_event_of_the_history_with_what_was_and_is(loosened):
    told = [e.detail for e in read_history(loosened.ready.store).events if e.event == "settings"]
    assert told == ["buffer.maxPolicyLag was 0, is now null; buffer.maxReplayLag was 0, is now null"]


@pytest.mark.parametrize(
    ("section", "before", "after"),
    [
        ("buffer", {"max_trajectories": 4}, {"max_trajectories": None}),
        ("buffer", {"max_trajectories": None}, {"max_trajectories": 4}),
        ("sync", {"ingest": "AtSync", "interval_steps": 1}, {"ingest": "Continuous", "interval_steps": 3}),
        ("trainer", {"micro_batch_tokens": 4096}, {"micro_batch_tokens": 8}),
    ],
)
def test_settings_that_decide_what_is_kept_drawn_or_summed_are_replayed(tmp_path, section, before, after):
    run = TinyRun(tmp_path, min_initial=0)
    set_live(run, section, before)
    set_live(run, "buffer", {"max_replay_ratio": 1.0})
    stop_in_a_wait(run, step=1)
    set_live(run, section, after)
    trainer = run.trainer()
    for seq in (1, 2):
        run.put_shard(seq)
    trainer.run()
    assert weights_that_differ(run.ready.store, replay(run.ready.store)) == []


def test_a_trainer_that_was_killed_goes_on_with_the_settings_that_its_checkpoint_knows(tmp_path):
    run = TinyRun(tmp_path, min_initial=0)
    set_live(run, "buffer", {"max_replay_ratio": 1.0, "max_trajectories": 2})
    run.trainer()
    set_live(run, "buffer", {"max_trajectories": 8})
    stop_in_a_wait(run, step=1)
    assert len(run.ready.learner.buffer) == 4
    trainer = run.trainer()
    run.put_shard(1)
    run.put_shard(2)
    trainer.run()
    assert len(run.ready.learner.buffer) == 8
    assert sum(e.event == "settings" for e in read_history(run.ready.store).events) == 1
    assert weights_that_differ(run.ready.store, replay(run.ready.store)) == []


def test_a_cap_that_was_raised_costs_no_row_when_the_trainer_is_resumed(tmp_path):
    run = TinyRun(tmp_path, min_initial=0)
    config = run.file.config
    buffer = config.buffer.model_copy(update={"max_trajectories": 2})
    run.file = run.file.model_copy(update={"config": config.model_copy(update={"buffer": buffer})})
    set_live(run, "buffer", {"max_replay_ratio": 1.0, "max_trajectories": 2})
    run.trainer()
    set_live(run, "buffer", {"max_trajectories": 8})
    stop_in_a_wait(run, step=1)
    run.trainer()
    assert len(run.ready.learner.buffer) == 4


def test_a_batch_that_the_ingest_log_does_not_explain_ends_the_replay_with_what_can_still_be_replayed(
    loosened, tmp_path
):
    store = open_store(forget_changes(loosened, tmp_path / "copy"))
    with pytest.raises(CorruptObject, match=r"step 2 of the run .*ingest log.*maxPolicyLag.* --steps 1$"):
        replay(store)
    assert replay(store, steps=1).step == 1


@pytest.mark.parametrize(
    ("glob", "data", "told"),
    [
        ("shards/*/*", None, "has gone, and step 1 was drawn with it: .*trajectoryRetention Keep"),
        (
            "ingest/*/*",
            b"garbage\n",
            r"a line of ingest/.*\.jsonl cannot be parsed: is no valid JSON .*, got b'garbage'; restore it from a copy",
        ),
        ("latest", b"", "latest cannot be parsed"),
    ],
)
def test_what_a_replay_needs_and_lacks_is_told_without_a_traceback(repaced, tmp_path, capsys, glob, data, told):
    shutil.copytree(repaced.uri.removeprefix("file://"), tmp_path / "copy")
    harmed = min((tmp_path / "copy").glob(glob))
    harmed.unlink()
    if data is not None:
        harmed.write_bytes(data)
    with pytest.raises(SystemExit) as caught:
        main(["replay", f"file://{tmp_path}/copy"])
    err = capsys.readouterr().err
    assert (caught.value.code, "Traceback" in err) == (1, False)
    assert re.search(told, err)


def test_weights_that_differ_are_told_with_what_would_explain_it(repaced, tmp_path, capsys):
    shutil.copytree(repaced.uri.removeprefix("file://"), tmp_path / "copy")
    record = json.loads((tmp_path / "copy" / RUN).read_bytes())
    record["config"]["objective"]["beta"] *= 2  # another order of the same rows may give the same weights
    (tmp_path / "copy" / RUN).write_text(json.dumps(record))
    with pytest.raises(SystemExit) as caught:
        main(["replay", f"file://{tmp_path}/copy"])
    verdict, reason = capsys.readouterr().out.splitlines()
    assert caught.value.code == 1
    assert "weights and checkpoint differ in" in verdict and "several ranks" in reason and "--threads" in reason
