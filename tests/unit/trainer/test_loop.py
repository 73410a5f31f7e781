"""The training loop on a tiny real model and a directory: what SIGTERM, waits and rollbacks leave behind."""

import errno
import json
import math
import os
import shutil
import threading
import time
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from support.tiny_run import TinyRun as Run

from tba import telemetry, trace
from tba.contracts.config import LiveConfig
from tba.contracts.errors import UserError
from tba.contracts.keys import CHECKPOINTS, LATEST, MANIFEST, EvalKey, WeightsKey
from tba.contracts.records import EvalRequest, Outcome
from tba.evaluation import EvalBlock, EvalResponse, encode_block
from tba.flops import model_shape
from tba.report.history import read_history
from tba.report.summary import Summary, summarise
from tba.store import AccessDenied
from tba.trainer.checkpoint import read_checkpoint, read_manifest
from tba.trainer.garbage import Swept
from tba.trainer.loop import Terminated
from tba.trainer.replay import read_recorded, replay

HANG = 60.0  # seconds after which a test that waits for the loop has failed


def wait_for(condition) -> None:
    deadline = time.monotonic() + HANG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def stopped_when(run: Run, reached) -> None:
    """Run a trainer until `reached(trainer)`, then ask it to end."""
    trainer, ended = run.trainer(), []
    thread = threading.Thread(target=lambda: ended.append(pytest.raises(Terminated, trainer.run)))
    thread.start()
    wait_for(lambda: reached(trainer))
    run.stop.set()
    thread.join(HANG)
    assert ended, "the trainer must end by itself"


def stopped_in_a_wait(run: Run, *, rows: int) -> None:
    """Run a trainer until it waits with so many rows ingested, then ask it to end."""
    stopped_when(run, lambda _: run.ready.learner.counters.ingested_rows >= rows)


@pytest.mark.parametrize("ingest", ["Continuous", "AtSync"])
def test_rows_ingested_in_a_wait_before_sigterm_survive_in_the_log_and_in_the_replay(tmp_path, ingest):
    run = Run(tmp_path, ingest=ingest)
    run.trainer()  # makes run and prompts
    first = run.put_shard(0)
    stopped_in_a_wait(run, rows=4)
    stopped_in_a_wait(run, rows=4)  # and once more, without a step in between
    second = run.put_shard(1)
    run.trainer().run()
    recorded = read_recorded(run.ready.store)
    assert [e.key for e in recorded.entries if e.key] == [first, second]
    torch.testing.assert_close(
        replay(run.ready.store).policy.master_state(),
        dict(read_checkpoint(run.ready.store, recorded.latest.checkpoint or "")[1].tensors["master"]),
        rtol=0,
        atol=0,
    )


def test_a_moving_reference_does_not_ask_for_a_checkpoint_at_every_step(tmp_path):
    run = Run(tmp_path, min_initial=0, reference={"type": "EMA", "decay": 0.9})
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    made = [o.key for o in run.ready.store.list_after(CHECKPOINTS) if o.key.endswith(MANIFEST)]
    assert len(made) == 2  # steps 0 and 3


def test_a_lost_latest_is_never_taken_for_a_new_run(tmp_path):
    run = Run(tmp_path, min_initial=0)
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    run.ready.store.delete([LATEST])
    with pytest.raises(UserError, match="never starts again from step 0"):
        run.trainer()


def test_a_score_is_known_again_though_no_checkpoint_told_of_it_before_a_crash(tmp_path):
    run = Run(tmp_path)
    request = EvalRequest(prompts="p", num_prompts=1, block_prompts=1, sampling="greedy", samples=1)

    def trainer():
        made = run.trainer()
        run.ready.eval_request = made._evaluations._request = request
        return made

    def crash():
        if first.tracker.eval_score is not None:
            raise RuntimeError("crash")

    first = trainer()
    first._check_stop = crash
    thread = threading.Thread(target=lambda: pytest.raises(RuntimeError, first.run))
    thread.start()
    wait_for(lambda: first._evaluations.gathering.pending is not None)
    weights = WeightsKey.parse(first._version0 or "")
    block = EvalBlock((EvalResponse(0, 0, Outcome.SCORED, 0.75, 1, (7,)),))
    run.ready.store.put_once(EvalKey(0, 1, weights.nonce, 0).path, encode_block(block))
    thread.join(HANG)
    assert first.tracker.eval_score == 0.75
    second = trainer()
    assert second.tracker.eval_score is None
    thread = threading.Thread(target=lambda: pytest.raises(Terminated, second.run))
    thread.start()
    try:
        wait_for(lambda: second.tracker.eval_score == 0.75)
    finally:
        run.stop.set()
        thread.join(HANG)
    assert read_manifest(run.ready.store, second._committer.latest.checkpoint or "").eval_scores == {0: 0.75}


class Stuck:
    """A background task that storage refuses."""

    outage = SimpleNamespace(description="storage has not answered for 20 s")

    def join(self, _timeout):
        return False


def test_sigterm_ends_a_wait_for_storage_that_does_not_answer(tmp_path):
    run = Run(tmp_path)
    trainer = run.trainer()
    run.stop.set()
    with pytest.raises(Terminated):
        trainer._join(Stuck())  # type: ignore[arg-type]
    assert (trainer.tracker.state, trainer.tracker.detail) == ("WaitingForStorage", Stuck.outage.description)


class Slow:
    """A background task that takes two looks."""

    outage = SimpleNamespace(description="")

    def __init__(self):
        self.looks = [False, True]

    def join(self, _timeout):
        return self.looks.pop(0)


def test_a_long_wait_for_an_upload_is_told_and_a_short_one_is_not(tmp_path, monkeypatch):
    run = Run(tmp_path)
    trainer = run.trainer()
    trainer.tracker.state = "Training"
    trainer._join(Slow())  # type: ignore[arg-type]
    assert trainer.tracker.state == "Training"
    monkeypatch.setattr("tba.trainer.loop.SLOW_SECONDS", 0.0)
    trainer._join(Slow())  # type: ignore[arg-type]
    assert trainer.tracker.state == "WaitingForStorage"
    trainer._history.seal()
    trainer._history.flush()
    events = [(e.event, e.detail) for e in read_history(run.ready.store).events]
    assert events == [("waiting_storage", trainer.tracker.detail), ("continued", "storage")]


def no_space_for_checkpoints(monkeypatch) -> threading.Event:
    """Storage has none for them while the event is set."""
    full, link = threading.Event(), os.link

    def link_unless_full(source, target):
        if full.is_set() and "/checkpoints/" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        link(source, target)

    monkeypatch.setattr("os.link", link_unless_full)
    full.set()
    return full


def test_a_full_disk_delays_no_end_that_is_asked_for_and_leaves_no_thread(tmp_path, monkeypatch):
    no_space_for_checkpoints(monkeypatch)
    run = Run(tmp_path)
    run.trainer()
    started = time.monotonic()
    stopped_when(run, lambda trainer: "no space left" in trainer.tracker.detail)
    assert time.monotonic() - started < 30, "of the 120 s that a call insists on storage that does not answer"
    assert not [t for t in threading.enumerate() if t.name in ("publish", "checkpoint", "commit", "garbage")]


def test_a_full_disk_shows_within_seconds_and_the_run_goes_on_when_there_is_space(tmp_path, monkeypatch):
    run = Run(tmp_path, min_initial=0)
    trainer = run.trainer()
    run.put_shard(0)
    full = no_space_for_checkpoints(monkeypatch)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    try:
        wait_for(lambda: trainer.tracker.state == "WaitingForStorage")
        assert "storage has had no space left" in trainer.tracker.detail
        wait_for(lambda: summarise(read_history(run.ready.store), time.time()).state == "WaitingForStorage")
    finally:
        full.clear()
        thread.join(HANG)
    assert trainer.tracker.state == "Complete"


def test_a_full_disk_is_swept_while_a_publish_waits_for_space(tmp_path, monkeypatch):
    run, link, superseded = Run(tmp_path, min_initial=0), os.link, tmp_path / "store" / "weights" / "0000000001"
    live = run.live.model_dump(mode="json")
    live["sync"] |= {"intervalSteps": 1, "retainVersions": 1, "delta": {"enabled": False}}
    live["storage"]["graceSeconds"] = 0.0
    run.live = LiveConfig.model_validate(live)
    monkeypatch.setattr("tba.trainer.housekeeping.GARBAGE_SECONDS", math.inf)

    def link_if_there_is_space(source, target):
        if "/weights/0000000003/" in str(target) and superseded.exists():
            monkeypatch.setattr("tba.trainer.housekeeping.GARBAGE_SECONDS", 0.0)
            raise OSError(errno.ENOSPC, "No space left on device")
        link(source, target)

    monkeypatch.setattr("os.link", link_if_there_is_space)
    trainer = run.trainer()
    run.put_shard(0)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    try:
        wait_for(lambda: trainer.tracker.state == "Complete")
    finally:
        run.stop.set()
        thread.join(HANG)
    assert not superseded.exists()


def test_a_snapshot_that_does_not_fit_leaves_the_space_that_there_is_to_the_next_try(tmp_path, monkeypatch):
    run, link, refused = Run(tmp_path, min_initial=0), os.link, []
    monkeypatch.setattr("tba.trainer.publish.MAX_FILE_BYTES", 1)  # a file a tensor

    def link_two_files(source, target):
        if target.match("weights/*/*/model-00002.safetensors") and len(refused) < 2:
            refused.append(target.parent)
            raise OSError(errno.ENOSPC, "No space left on device")
        link(source, target)

    monkeypatch.setattr("os.link", link_two_files)
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    assert len(refused) == 2 and not any(folder.exists() for folder in refused)
    assert trainer.tracker.state == "Complete"


def test_rewards_that_all_fail_are_seen_in_the_bucket_before_any_step(tmp_path):
    run = Run(tmp_path)
    trainer = run.trainer()
    run.put_shard(0, failed=True)
    thread = threading.Thread(target=lambda: pytest.raises(Terminated, trainer.run))
    thread.start()
    seen: list[Summary] = []

    def told() -> bool:
        seen.append(summarise(read_history(run.ready.store), time.time()))
        return "4 responses have no reward" in seen[-1].detail and seen[-1].searchers_alive > 0

    try:
        wait_for(told)
    finally:
        run.stop.set()
        thread.join(HANG)
    last = seen[-1]
    assert (last.state, last.step, last.trajectories, last.failed_trajectories) == ("WaitingForData", 0, 4, 4)


def test_a_wait_is_told_when_it_becomes_another_and_every_minute(tmp_path, monkeypatch):
    told: list[str] = []
    report = Run(tmp_path).trainer()._report
    monkeypatch.setattr(report, "event", lambda event, detail: told.append(detail))
    for reason in ("0 of 8 rows", "1 of 8 rows", "1 of 8 rows; 3 failed", "1 of 8 rows; 4 failed"):
        report.waiting("waiting", reason)
    assert told == ["0 of 8 rows", "1 of 8 rows; 3 failed"]
    monkeypatch.setattr("tba.trainer.reporter.WAITING_SECONDS", 0.0)
    report.waiting("waiting", "1 of 8 rows; 9 failed")
    assert told[2:] == ["1 of 8 rows; 9 failed"]


@pytest.mark.parametrize(("waited", "saved"), [(0.0, True), (20.0, False)])
def test_the_last_checkpoint_must_fit_what_is_left_of_the_grace_and_not_the_whole_of_it(tmp_path, waited, saved):
    run = Run(tmp_path)
    trainer = run.trainer()
    trainer._publish(None)
    trainer._join(trainer._publisher.background)
    trainer._checkpointer.last_seconds = 50.0  # of a grace of 60
    run.stop.set()
    run.stop.since -= waited
    with pytest.raises(Terminated):
        trainer._check_stop()
    assert (run.ready.committer.latest.checkpoint is not None) == saved


def test_a_shard_lost_between_two_trainers_costs_its_rows_and_not_the_run(tmp_path):
    run = Run(tmp_path, min_initial=100)
    run.trainer()
    kept, lost = run.put_shard(0), run.put_shard(1)
    stopped_in_a_wait(run, rows=8)
    run.ready.store.delete([lost])
    stopped_in_a_wait(run, rows=8)
    history = read_history(run.ready.store)
    assert [(q.key, q.reason.split(":")[0]) for q in history.quarantines] == [(lost, "gone")]
    assert [e.detail.split(":")[0] for e in history.events if e.event == "shard_lost"] == [f"4 rows of {lost}"]
    assert history.events[-1].event == "stopped"
    learner = run.ready.learner
    assert (len(learner.buffer), list(learner.shard_paths.values())) == (4, [kept])
    assert learner.counters.quarantined_shards == 1 and learner.counters.ingested_rows == 8
    run.trainer()
    assert run.ready.lost == [], "told once: the next checkpoint does not name it any more"


def test_a_run_that_has_begun_needs_no_prompts_file_and_with_a_checkpoint_no_model(tmp_path):
    run = Run(tmp_path, min_initial=100)
    run.trainer()  # ends before its first checkpoint
    (tmp_path / "prompts.jsonl").unlink()
    run.trainer()
    assert run.ready.fresh
    stopped_when(run, lambda trainer: run.ready.committer.latest.checkpoint is not None)
    shutil.rmtree(tmp_path / "model")
    run.trainer()
    assert not run.ready.fresh and len(run.ready.prompts) == 4


def test_an_object_that_is_no_shard_is_counted_once_whatever_number_of_trainers_see_it(tmp_path):
    run = Run(tmp_path)
    run.trainer()
    run.ready.store.put_once("shards/0000000001/notes.txt", b"hello")
    for _ in range(3):
        # `relieved`: a poll has begun and ended since it waits, and what that found has been taken.
        stopped_when(run, lambda trainer: trainer._ingestor._windows.relieved and trainer._ingestor._queue.empty())
    assert run.ready.learner.counters.quarantined_shards == 1
    assert len(read_history(run.ready.store).quarantines) == 1


def test_credentials_that_rotate_at_the_end_delay_the_end_and_the_run_is_complete(tmp_path):
    run = Run(tmp_path, min_initial=0)
    trainer = run.trainer()
    run.put_shard(0)
    real, refused = run.ready.store.cas, []

    def cas(key, data, etag):
        if b'"Complete"' in data and len(refused) < 2:
            if refused:
                real(key, data, etag)  # it lands, and the reply is lost: the next try finds the run complete
            refused.append(key)
            raise AccessDenied("the token has expired")
        return real(key, data, etag)

    run.ready.store.cas = cas
    trainer.run()
    assert len(refused) == 2 and trainer.tracker.state == "Complete"


@pytest.mark.parametrize("part", ["_flusher", "_ingestor", "_keeping.garbage"])
def test_a_thread_that_died_ends_the_run_with_its_error(tmp_path, part):
    trainer = Run(tmp_path).trainer()
    attrgetter(part)(trainer)._error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        trainer._housekeeping()


def test_rights_that_the_sweep_lacks_for_a_while_are_sat_out(tmp_path, monkeypatch):
    trainer, tries = Run(tmp_path).trainer(), []

    def sweep(*_args, **_options):
        tries.append(1)
        if len(tries) < 3:
            raise AccessDenied("may not delete")
        return Swept(0, 0)

    keeping = trainer._keeping
    monkeypatch.setattr(keeping.sweeper, "sweep", sweep)
    monkeypatch.setattr(keeping.garbage, "_sleep", lambda _seconds: None)
    keeping.garbage.submit(keeping.sweep)
    assert keeping.garbage.join(HANG) and len(tries) == 3


def test_the_sweep_knows_scores_that_no_checkpoint_carries_yet(tmp_path, monkeypatch):
    trainer, seen = Run(tmp_path).trainer(), []
    sweeper = trainer._keeping.sweeper
    monkeypatch.setattr(sweeper, "sweep", lambda *_a, scores, **_k: seen.append(dict(scores)) or Swept(0, 0))
    trainer._evaluations._scores.append((3, 0.5))
    trainer._apply_results()
    trainer._keeping.sweep()
    assert seen == [{3: 0.5}] and trainer.tracker.eval_score == 0.5


def test_requests_of_the_trainer_to_storage_are_counted(tmp_path):
    def counted() -> float:
        return sum(s.value for m in telemetry.STORAGE_REQUESTS.collect() for s in m.samples)

    before = counted()
    Run(tmp_path).trainer()
    assert counted() > before


def test_the_rows_of_a_run_split_all_its_time_and_each_second_once(tmp_path):
    run = Run(tmp_path, min_initial=0)
    trainer = run.trainer()
    run.put_shard(0)
    trainer.run()
    rows = read_history(run.ready.store).steps
    assert [r.step for r in rows] == [1, 2, 3]
    for row in rows:
        assert min(row.phase_seconds.values()) >= 0
        assert {"reference", "forward_backward", "optimizer", "ingest", "other"} <= set(row.phase_seconds)
    assert sum(r.span_seconds for r in rows) == pytest.approx(rows[-1].wall_seconds)
    assert rows[0].phase_seconds["stage"] > 0 and rows[0].phase_seconds["capture"] > 0, "of the start"


def test_the_flops_of_a_step_are_those_of_its_rows(tmp_path):
    run = Run(tmp_path, min_initial=0)
    trainer = run.trainer()
    run.put_shard(0)
    results = []
    trainer._on_step = results.append
    trainer.run()
    rows = read_history(run.ready.store).steps
    model = run.ready.learner.policy.model
    shape = model_shape(model.config.to_dict(), [(n, tuple(p.shape)) for n, p in model.named_parameters()])
    length = len(run.ready.prompts.prompt_tokens(0))  # of every prompt; every response has 3 tokens, two of them fed in
    group, fed = shape.forward(length, 0) + 2 * shape.generate(length, 3), length + 2 * 2
    for row, result in zip(rows, results, strict=True):
        repeated = result.trained_tokens - 2 * fed  # prompts that the two rows of a group did not share
        assert repeated % length == 0
        training = 3 * (2 * group + 2 * shape.matrix_parameters * repeated)
        assert row.model_flops == pytest.approx(training + group * row.scored_tokens / fed)
        assert row.peak_flops is None, "a CPU has no peak that we know"


def test_a_timeline_shows_what_the_trainer_does_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setenv(trace.DIRECTORY, str(tmp_path / "traces"))
    run = Run(tmp_path, min_initial=0)
    with trace.recording("trainer"):
        trainer = run.trainer()
        run.put_shard(0)
        trainer.run()
    (path,) = (tmp_path / "traces").iterdir()
    events = json.loads(path.read_text())
    names = {e["name"] for e in events}
    assert {"train_step", "forward_backward (sum)", "stage", "capture", "publish", "checkpoint", "poll"} <= names
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"MainThread", "publish", "checkpoint", "ingest"} <= tracks
