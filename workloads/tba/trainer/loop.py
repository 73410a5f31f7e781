"""The training loop: owns the flow of one trainer process (system.md §3).

```
 ingest thread ─ shards ─► queue ─┐                             ┌─► publish thread ─ snapshot ─► CAS latest
                                  ▼                             │
        ┌── housekeeping ─► ingest ─► waiting? ─► train step ───┼─► checkpoint thread ─ state ─► CAS latest
        │   (live config, fence,      │ yes: say what is        │
        │    windows, garbage)        ▼ awaited, bounded        ├─► journal thread ─ metrics/, ingest/
        └────────────────────────── wait                        └─► evaluate thread ◄─ eval/ blocks of searchers
```
The loop waits for no searcher: while there are none it learns from the buffer up to `maxReplayRatio`, then says
WaitingForData. It waits for storage only when two publishes (or two checkpoints) overlap.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tba import telemetry
from tba.contracts.config import LiveConfig
from tba.contracts.errors import CorruptObject, Fenced, StoreUnavailable
from tba.contracts.history import EvalRow, EventRow, QuarantineRow
from tba.contracts.keys import WeightsKey, new_nonce
from tba.contracts.records import IngestEntry, RunState, ShardId
from tba.failpoints import failpoint
from tba.log import (
    CHECKPOINT_SKIPPED,
    CHECKPOINT_WRITTEN,
    DATA_ARRIVED,
    DATA_AWAITED,
    EVALUATION_COMPLETED,
    HOLD_WEAKENED,
    OBJECTS_SWEPT,
    REFERENCE_CHANGED,
    RUN_FINISHED,
    RUN_RESUMED,
    RUN_STARTED,
    SHARD_QUARANTINED,
    SHARDS_INGESTED,
    STEP_COMPLETED,
    STORAGE_FAILED,
    log,
)
from tba.protocol.garbage import Retention
from tba.protocol.latest import checkpointed, evaluation_done, finished, window_advanced
from tba.snapshots import fetch_manifest
from tba.trainer.background import Background
from tba.trainer.checkpoint import TrainerState, held_shards, write_checkpoint
from tba.trainer.evaluate import Evaluator, Pending
from tba.trainer.garbage import Sweeper
from tba.trainer.ingest import Arrival, Ingestor
from tba.trainer.journal import Journal
from tba.trainer.learner import StepResult
from tba.trainer.progress import WEAK_HOLD, Timing, Tracker, record_metrics, sample_row, step_row
from tba.trainer.publish import Published, Publisher
from tba.trainer.startup import Ready, binding

JOURNAL_SECONDS = 2.0
WINDOW_SECONDS = 30.0
FENCE_SECONDS = 10.0
GARBAGE_SECONDS = 60.0
ROWS_EVERY_STEPS = 10


class Terminated(Exception):
    """SIGTERM ended the loop between two steps."""


@dataclass(slots=True)
class Clocks:
    """When the loop last did what it does from time to time (monotonic seconds)."""

    window: float = field(default_factory=time.monotonic)
    fence: float = field(default_factory=time.monotonic)
    garbage: float = field(default_factory=time.monotonic)
    data: float = field(default_factory=time.monotonic)
    """When rows last arrived."""


class Trainer:
    """One trainer process from take-over to the end."""

    def __init__(
        self,
        ready: Ready,
        live: Callable[[], LiveConfig],
        *,
        stop: threading.Event,
        heartbeat: telemetry.Heartbeat,
        grace_seconds: float,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        self._ready = ready
        self._live = live
        self._stop = stop
        self._heartbeat = heartbeat
        self._grace_seconds = grace_seconds
        self._on_step = on_step
        self._store, self._committer, self._learner = ready.store, ready.committer, ready.learner
        self._book = ready.book
        self._epoch = ready.book.epoch
        self._total = ready.record.config.objective.total_steps
        self._history = Journal(self._store, "metrics", self._epoch)
        self._ingest_log = Journal(self._store, "ingest", self._epoch)
        give_up = live().sync.stall_timeout_seconds
        self._checkpointer = Background("checkpoint", give_up_seconds=give_up)
        self._commits = Background("commit", give_up_seconds=give_up)
        self._garbage = Background("garbage", give_up_seconds=0.0)
        self._journals = threading.Thread(target=self._flush_journals, name="journal", daemon=True)
        self._publisher = Publisher(
            self._store,
            self._committer,
            assets=ready.assets,
            give_up_seconds=give_up,
            on_published=self._after_publish,
        )
        poll = lambda: self._live().sync.poll_interval_seconds  # noqa: E731
        self._evaluator = Evaluator(
            self._store, epoch=self._epoch, poll_seconds=poll, on_complete=self._after_evaluation
        )
        self._ingestor = Ingestor(
            self._store,
            binding(ready.record, ready.prompts, self._learner.policy.model),
            lowest_unswept_window=ready.book.ingest_state.lowest_unswept_window,
            commit=lambda: self._committer.latest.commit,
            is_ingested=lambda shard: self._book.contains(shard),
            starved=lambda: self._waiting is not None,
            poll_seconds=poll,
        )
        self._sweeper = Sweeper(self._store, self._committer)
        self._waiting: str | None = None
        self._closing = threading.Event()
        self._clocks = Clocks()
        self._wait_data = self._wait_storage = 0.0
        self._checkpoint_seconds = 0.0
        self._committed: deque[str] = deque()  # checkpoint keys, from the checkpoint thread to the loop
        self._scores: deque[float] = deque()  # evaluation scores, likewise
        self._version0 = ready.version0
        self._published_version = self._committer.latest.version
        self._shards_since_commit = 0
        self._synced_step = -1
        self._extends_sync = False  # AtSync: the next rows join the pool of this wait in place of replacing it
        self._open_entries: list[IngestEntry] = []  # of the ingest log, since the last step
        for entry in ready.carried:
            self._log_ingest(entry)
        self.tracker = Tracker(
            run_id=ready.record.run_id,
            pod_uid=os.environ.get("TBA_POD_UID"),
            epoch=self._epoch,
            total_steps=self._total,
            step=self._book.step,
            first_step=self._book.step,
            eval_score=self._book.eval_score,
            trajectories=self._learner.counters.ingested_rows,
        )

    # -- the flow

    def run(self) -> None:
        """Train to the last step, wait for the last evaluation, end the run.

        Raises: Fenced, StoreUnavailable, Terminated (after a checkpoint, if one fits the grace).
        """
        self._begin()
        try:
            while self._learner.step < self._total:
                self._check_stop()
                self._housekeeping()
                self._ingest()
                reason = self._learner.waiting_for(self._live())
                if reason is not None:
                    self._wait(reason)
                else:
                    self._train_step()
            self._end()
        finally:
            self._close()

    def _begin(self) -> None:
        event = "started" if self._ready.fresh else "resumed"
        log.info(RUN_STARTED if self._ready.fresh else RUN_RESUMED, epoch=self._epoch, step=self._book.step)
        self._event(event, f"epoch {self._epoch} at step {self._book.step}")
        self._journals.start()
        self._evaluator.start()
        wanted = self._committer.latest.evaluation
        # A fallback to an older checkpoint may have rolled back further than the take-over knew.
        if wanted is not None and WeightsKey.parse(wanted).version <= self._book.step:
            self._expect(wanted)
        # Searchers follow the restored weights at once; a fresh run shows version 0.
        self._publish(evaluate=self._ready.fresh or self._learner.step == self._total)
        self._join(self._publisher.background)
        if self._ready.fresh:
            self._checkpoint()
            self._join(self._checkpointer)
        self._ingestor.start()

    def _train_step(self) -> None:
        if self._waiting is not None:
            self._event("continued", self._waiting)
            log.info(DATA_ARRIVED, waited_seconds=round(self._wait_data, 2))
            self._waiting = None
        self.tracker.state, self.tracker.detail = "Training", ""
        started = time.monotonic()
        result = self._learner.train_step(self._live(), self._epoch)
        self._open_entries = []
        self._extends_sync = False
        step = self._learner.step
        failpoint("step.after_update")
        seconds = time.monotonic() - started
        timing = Timing(seconds, self._wait_data, self._wait_storage)
        self._learner.counters.wall_seconds += seconds + self._wait_data + self._wait_storage
        self._wait_data = self._wait_storage = 0.0
        self._book = self._book.stepped(timing.step_seconds + timing.wait_data_seconds + timing.wait_storage_seconds)
        self._report_step(result, timing)
        self._heartbeat.beat()
        live = self._live()
        due = self._evaluation_due(step)
        if step % live.sync.interval_steps == 0 or due or step == self._total:
            self._publish(evaluate=due)
        # A moving average changes at every step: it travels in the checkpoints that are due anyway.
        reset = result.reference_changed and self._learner.policy.caches_reference
        if step % live.storage.checkpoints.every_steps == 0 or step == self._total or reset:
            self._checkpoint()

    def _end(self) -> None:
        """The last weights are published and checkpointed: wait for their evaluation, then close the run for good."""
        self._join(self._publisher.background)
        self._join(self._checkpointer)
        self._apply_results()
        limit = self._live().sync.stall_timeout_seconds
        self.tracker.state = "Evaluating"
        while (pending := self._evaluator.pending) is not None:
            self._check_stop()
            self._housekeeping()
            self.tracker.detail = (
                f"{self._evaluator.blocks_done} of {pending.request.num_blocks} blocks of version "
                f"{pending.weights.version} evaluated by searchers"
            )
            if time.monotonic() - self._evaluator.last_progress > limit:
                self._event("evaluation_abandoned", f"no block for {limit:.0f} s: {self.tracker.detail}")
                break
            self._heartbeat.beat()
            time.sleep(0.1)
        self._apply_results()
        self._periodic_rows()
        self._event("finished", f"step {self._learner.step}")
        self._history.seal()
        self._ingest_log.seal()
        self._ingest_log.flush()
        self._history.flush()
        self._committer.commit(lambda current, nonce: finished(current, RunState.COMPLETE, nonce))
        self.tracker.state, self.tracker.detail = "Complete", ""
        log.info(RUN_FINISHED, step=self._learner.step, eval_score=self.tracker.eval_score)

    def _close(self) -> None:
        self._closing.set()
        self._ingestor.close()
        self._evaluator.close()
        if self._journals.is_alive():
            self._journals.join(10.0)

    # -- rows in

    def _ingest(self, timeout_seconds: float = 0.0) -> None:
        """Continuous: whatever has arrived. AtSync: only right after a publish, or while starved (the paper)."""
        at_sync = self._live().sync.ingest == "AtSync"
        if at_sync and self._waiting is None and self._synced_step == self._published_step():
            return
        self._synced_step = self._published_step()
        arrivals = self._ingestor.take(timeout_seconds)
        if not arrivals:
            return
        accepted = [a for a in arrivals if self._accept(a)]
        self._ingestor.ingested(arrivals)
        self._shards_since_commit += len(accepted)
        self._clocks.data = time.monotonic()
        if at_sync:
            extend = self._extends_sync
            self._learner.sampler.on_sync(self._learner.buffer, extend=extend)
            step = self._learner.step + 1
            self._log_ingest(IngestEntry(before_step=step, key="", num_rows=0, synced=True, extended=extend))
            self._extends_sync = self._waiting is not None
        self.tracker.searchers = self._learner.counters.alive(time.time())
        self.tracker.trajectories = self._learner.counters.ingested_rows
        log.debug(SHARDS_INGESTED, shards=len(accepted), rows=self._learner.counters.ingested_rows)

    def _log_ingest(self, entry: IngestEntry) -> None:
        self._open_entries.append(entry)
        self._ingest_log.append(entry)

    def _published_step(self) -> int:
        k = self._live().sync.interval_steps
        return self._learner.step // k * k

    def _accept(self, arrival: Arrival) -> bool:
        """Count the shard as ingested, rows or not; a bad one is quarantined, never fatal."""
        if arrival.shard_id is not None and self._book.contains(arrival.shard_id):
            return False
        reason = arrival.reason
        rows = 0
        if arrival.batch is not None:
            try:
                self._learner.ingest_shard(arrival.key, arrival.batch, self._book, now=time.time())
                rows = len(arrival.batch)
                telemetry.TRAJECTORIES.labels("ingested").inc(rows)
            except CorruptObject as error:
                reason = str(error)
        if arrival.shard_id is not None:
            self._book = self._book.ingest(arrival.shard_id)
            self._log_ingest(
                IngestEntry(
                    before_step=self._learner.step + 1, key=arrival.key, num_rows=rows, quarantined=reason or None
                )
            )
        if reason:
            self._quarantine(arrival.key, reason)
        return not reason

    def _quarantine(self, key: str, reason: str) -> None:
        self._learner.counters.quarantined_shards += 1
        telemetry.TRAJECTORIES.labels("quarantined").inc()
        log.error(SHARD_QUARANTINED, key=key, reason=reason)
        self._history.append(
            QuarantineRow(epoch=self._epoch, step=self._learner.step, time=time.time(), key=key, reason=reason)
        )

    def _wait(self, reason: str) -> None:
        started = time.monotonic()
        if reason != self._waiting:
            if self._waiting is None:
                self._event("waiting", reason)
                self._ingestor.poll_now()
            log.info(DATA_AWAITED, reason=reason)
            self._waiting = reason
        self.tracker.state, self.tracker.detail = "WaitingForData", self._describe_wait(reason)
        self._ingest(timeout_seconds=min(0.5, self._live().sync.poll_interval_seconds))
        self._wait_data += time.monotonic() - started
        self._heartbeat.beat()

    def _describe_wait(self, reason: str) -> str:
        unavailable = self._ingestor.unavailable_since
        if unavailable is not None:
            return f"{reason}; storage has not answered for {time.monotonic() - unavailable:.0f} s"
        silent = time.monotonic() - self._clocks.data
        stalled = silent > self._live().sync.stall_timeout_seconds
        return f"{reason}; no shard for {silent:.0f} s" + (" (SyncStalled)" if stalled else "")

    # -- weights and state out

    def _publish(self, *, evaluate: bool) -> None:
        waited = time.monotonic()
        self._join(self._publisher.background)
        self._wait_storage += time.monotonic() - waited
        started = time.monotonic()
        tensors = self._learner.policy.stage()
        staged = time.monotonic() - started
        telemetry.SYNC_SECONDS.labels("stage").observe(staged)
        self._wait_storage += self._publisher.publish(
            tensors,
            version=self._learner.step,
            epoch=self._epoch,
            evaluation=self._ready.eval_request if evaluate else None,
            stage_seconds=staged,
        )

    def _after_publish(self, done: Published) -> None:
        """In the publish thread."""
        self._history.append(done.row)
        self._published_version = done.manifest.version
        self.tracker.policy_version = done.manifest.version
        self._shards_since_commit = 0
        if done.manifest.version == 0 and self._version0 is None:
            self._version0 = done.key
        if done.manifest.evaluation is not None:
            self._evaluator.expect(Pending(done.key, done.manifest.evaluation, time.time()))
        telemetry.SNAPSHOT_BYTES.labels(done.row.encoding).set(done.row.total_bytes)
        telemetry.SYNC_SECONDS.labels("upload").observe(done.row.upload_seconds)
        telemetry.SYNC_SECONDS.labels("commit").observe(done.row.commit_seconds)

    def _checkpoint(self) -> None:
        """Capture now; upload and commit beside the loop. The ingest log it belongs to is durable before it."""
        waited = time.monotonic()
        self._join(self._checkpointer)
        self._wait_storage += time.monotonic() - waited
        self._apply_results()
        started = time.monotonic()
        book = self._book.swept(self._ingestor.durable_window()).logged(
            ingest_log_seq=self._ingest_log.seal(), metrics_log_seq=self._history.seal()
        )
        self._book = book
        state = self._learner.state()
        # What was ingested since the last step is in this state, but this epoch's log of it ends with this epoch.
        carried = [entry.to_json().decode() for entry in self._open_entries]
        facts = {**state.facts, "version0": self._version0, "carried": carried}
        manifest = book.manifest(new_nonce(), [])
        detached = TrainerState(state.tensors, facts)

        def task() -> None:
            self._ingest_log.flush()
            self._history.flush()
            key = write_checkpoint(self._store, manifest, detached)
            self._committer.commit(lambda current, nonce: checkpointed(current, key, nonce))
            failpoint("checkpoint.after_commit")
            self._committed.append(key)
            self._checkpoint_seconds = time.monotonic() - started
            log.info(CHECKPOINT_WRITTEN, step=manifest.step, seconds=round(self._checkpoint_seconds, 3))
            self._event("checkpoint", f"step {manifest.step}")

        self._checkpointer.submit(task)

    # -- evaluation

    def _evaluation_due(self, step: int) -> bool:
        if self._ready.eval_request is None:
            return False
        every = self._ready.record.config.task.evaluation.every_steps
        if step != self._total and step % every != 0:
            return False
        # One at a time: an evaluation that searchers have not finished is never thrown away but for the last.
        return step == self._total or self._evaluator.pending is None

    def _expect(self, manifest_key: str) -> None:
        manifest = fetch_manifest(self._store, manifest_key)
        if manifest.evaluation is not None:
            self._evaluator.expect(Pending(manifest_key, manifest.evaluation, time.time()))

    def _after_evaluation(self, pending: Pending, row: EvalRow) -> None:
        """In the evaluate thread. A row of an older trainer's snapshot is kept only if its step survived."""
        if row.num_prompts:
            self._history.append(row)
            self._scores.append(row.pass_at_1)
            self.tracker.eval_score = row.pass_at_1
            log.info(EVALUATION_COMPLETED, policy_version=row.step, pass_at_1=row.pass_at_1, pass_at_k=row.pass_at_k)
        else:  # nothing could be scored: that is a failure, not a score of 0
            self._event("evaluation_failed", f"version {row.step}: {row.failed} responses, none with a reward")
        try:
            self._committer.commit(lambda current, nonce: evaluation_done(current, pending.manifest_key, nonce))
        except (StoreUnavailable, Fenced) as error:
            # Harmless: searchers find every block done. The loop meets the same error where it matters.
            log.warning(STORAGE_FAILED, task="evaluate", error=str(error))

    # -- now and then

    def _housekeeping(self) -> None:
        self._publisher.background.check()
        self._checkpointer.check()
        self._commits.check()
        self._evaluator.check()
        self._apply_results()
        now = time.monotonic()
        if self._shards_since_commit and now - self._clocks.window > WINDOW_SECONDS and not self._commits.busy:
            self._clocks.window, self._shards_since_commit = now, 0
            self._commits.submit(lambda: self._committer.commit(window_advanced))
        elif now - self._clocks.fence > FENCE_SECONDS and not self._commits.busy:
            self._clocks.fence = now
            self._commits.submit(self._committer.check)
        if now - self._clocks.garbage > GARBAGE_SECONDS and not self._garbage.busy:
            self._clocks.garbage = now
            self._garbage.submit(self._sweep)
        self._learner.buffer.set_max_trajectories(self._live().buffer.max_trajectories)

    def _sweep(self) -> None:
        live = self._live()
        try:
            swept = self._sweeper.sweep(Retention.of(live.sync, live.storage), held_by=self._held_by)
        except (StoreUnavailable, CorruptObject) as error:
            log.warning(STORAGE_FAILED, task="garbage", error=str(error))
            return
        if swept.num_objects:
            log.info(OBJECTS_SWEPT, objects=swept.num_objects, total_bytes=swept.total_bytes)

    def _held_by(self, checkpoint_key: str) -> Collection[ShardId]:
        """Shards whose rows a checkpoint's buffer holds, or ("") the live one's."""
        if not checkpoint_key:
            return list(self._learner.shard_paths)
        return held_shards(self._store, checkpoint_key)

    def _apply_results(self) -> None:
        while self._committed:
            self._book = self._book.checkpointed(self._committed.popleft())
        while self._scores:
            self._book = self._book.evaluated(self._scores.popleft())

    def _join(self, background: Background) -> None:
        """Wait for a background task, visibly. Raises: Terminated if SIGTERM came and storage does not answer."""
        while not background.join(0.5):
            since = background.waiting_since  # read once: the thread resets it
            if since is not None:
                waited = time.monotonic() - since
                self.tracker.state = "WaitingForStorage"
                self.tracker.detail = f"storage has not answered for {waited:.0f} s"
                if self._stop.is_set():
                    log.warning(CHECKPOINT_SKIPPED, reason=self.tracker.detail)
                    raise Terminated
            self._heartbeat.beat()

    def _flush_journals(self) -> None:
        while not self._closing.wait(JOURNAL_SECONDS):
            self._ingest_log.seal()
            self._history.seal()
            try:
                self._ingest_log.flush()
                self._history.flush()
            except StoreUnavailable as error:
                log.warning(STORAGE_FAILED, task="journal", error=str(error))

    def _check_stop(self) -> None:
        if not self._stop.is_set():
            return
        self._join(self._checkpointer)
        if self._checkpoint_seconds <= self._grace_seconds:
            self._checkpoint()
            self._join(self._checkpointer)
        else:
            log.warning(
                CHECKPOINT_SKIPPED,
                reason=f"the last took {self._checkpoint_seconds:.0f} s, the grace is {self._grace_seconds:.0f} s",
            )
        self._history.seal()
        self._history.flush()
        raise Terminated

    # -- telling

    def _report_step(self, result: StepResult, timing: Timing) -> None:
        row = step_row(self._learner, result, timing, epoch=self._epoch, published_version=self._published_version)
        self._history.append(row)
        record_metrics(row, result)
        self.tracker.stepped(row)
        if self._on_step is not None:
            self._on_step(result)
        lag = max(row.staleness, default=0)
        log.info(
            STEP_COMPLETED,
            step=row.step,
            loss=round(row.loss, 6),
            reward_mean=round(row.reward_mean, 4),
            kl=round(row.kl, 4),
            staleness_max=lag,
            seconds=round(row.step_seconds, 3),
        )
        if result.reference_changed:
            log.info(REFERENCE_CHANGED, step=row.step)
        if 0 < row.beta_ratio < WEAK_HOLD and lag > self._live().sync.interval_steps:
            log.warning(HOLD_WEAKENED, beta_ratio=row.beta_ratio, staleness_max=lag)
        if row.step % ROWS_EVERY_STEPS == 0:
            self._periodic_rows()
        if row.step % max(1, self._total // 200) == 0:
            self._sample(result)

    def _sample(self, result: StepResult) -> None:
        slot = (result.plan.step * 7919) % len(result.plan.rows)
        buffer, decode = self._learner.buffer, self._ready.tokenizer.decode
        prompt = decode(buffer.prompt_tokens(int(result.plan.prompt_ids[slot])).tolist())
        response = decode(buffer.tokens(int(result.plan.rows[slot, 0])).tolist())
        self._history.append(
            sample_row(self._learner, result, epoch=self._epoch, prompt=prompt, response=response, slot=slot)
        )

    def _periodic_rows(self) -> None:
        now, counters = time.time(), self._learner.counters
        for row in counters.searcher_rows(epoch=self._epoch, step=self._learner.step, now=now):
            self._history.append(row)
        self._history.append(counters.length_row(epoch=self._epoch, step=self._learner.step, now=now))
        self.tracker.searchers = counters.alive(now)

    def _event(self, event: str, detail: str = "") -> None:
        self._history.append(
            EventRow(epoch=self._epoch, step=self._learner.step, time=time.time(), event=event, detail=detail)
        )
