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

import time
from collections.abc import Callable

from tba import telemetry, trace
from tba.contracts.config import Delta, LiveConfig
from tba.contracts.keys import CheckpointKey, WeightsKey, new_nonce
from tba.contracts.records import EvalRequest, RunState
from tba.failpoints import failpoint
from tba.log import (
    CHECKPOINT_SKIPPED,
    DATA_ARRIVED,
    DATA_AWAITED,
    RUN_FINISHED,
    RUN_RESUMED,
    RUN_STARTED,
    STORAGE_FAILED,
    log,
)
from tba.lora import scale_of
from tba.protocol.latest import RunEnded, finished
from tba.stop import StopFlag
from tba.trainer.alarms import reward_label
from tba.trainer.background import Background
from tba.trainer.checkpoint import LoopFacts, TrainerState
from tba.trainer.checkpointer import Checkpointer
from tba.trainer.colocated import Colocated, nobody
from tba.trainer.evaluations import Evaluations
from tba.trainer.housekeeping import Housekeeping
from tba.trainer.ingest import Ingestor
from tba.trainer.intake import Intake
from tba.trainer.journal import Flusher, Journal
from tba.trainer.learner import StepResult
from tba.trainer.outage import PASSING
from tba.trainer.phases import Phases
from tba.trainer.progress import Tracker
from tba.trainer.publish import AdapterOf, Published, Publisher
from tba.trainer.reporter import Reporter
from tba.trainer.startup import Ready, binding

SLOW_SECONDS = 5.0
"""Longer waits for an upload are shown."""


class Terminated(Exception):
    """SIGTERM ended the loop between two steps."""


class Trainer:
    """One trainer process from take-over to the end."""

    def __init__(
        self,
        ready: Ready,
        live: Callable[[], LiveConfig],
        *,
        stop: StopFlag,
        heartbeat: telemetry.Heartbeat,
        grace_seconds: float,
        tracker: Tracker,
        on_step: Callable[[StepResult], None] | None = None,
        colocated: Colocated | None = None,
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
        self.tracker = tracker
        self._history = Journal(self._store, "metrics", self._epoch)
        self._ingest_log = Journal(self._store, "ingest", self._epoch)
        self._report = Reporter(
            self._history, self._learner, tracker, epoch=self._epoch, decode=ready.tokenizer.decode, live=live
        )
        self._colocated = colocated or nobody()
        self._colocated.attach(tell=self._report.event, beat=heartbeat.beat, stopping=stop.is_set)
        self._phases = Phases()
        self._waiting: str | None = None
        self._version0 = ready.facts.version0
        self._published_version = self._committer.latest.version
        self._make_threads()
        tracker.claimed(
            run_id=ready.record.run_id,
            epoch=self._epoch,
            step=self._book.step,
            eval_score=self._book.eval_score,
            trajectories=self._learner.counters.ingested_rows,
            checkpoint_step=None if ready.fresh else self._book.step,
        )
        tracker.alarms.reward = reward_label(ready.record.config.task.reward)
        tracker.alarms.outages = lambda: [thread.outage for thread in self._threads]
        self._report.judged_signal()

    def _make_threads(self) -> None:
        ready, live = self._ready, self._live
        give_up = live().sync.stall_timeout_seconds
        logs = (self._ingest_log, self._history)
        self._flusher = Flusher(logs, give_up_seconds=give_up)
        self._checkpointer = Checkpointer(
            self._store, self._committer, logs, give_up_seconds=give_up, event=self._report.event
        )
        self._keeping = Housekeeping(
            self._store, self._committer, self._learner, live=live, book=lambda: self._book, give_up_seconds=give_up
        )
        self._publisher = Publisher(
            self._store,
            self._committer,
            assets=ready.assets,
            delta=lambda: live().sync.delta if ready.record.config.model.lora is None else Delta(enabled=False),
            give_up_seconds=give_up,
            on_published=self._after_publish,
            parts=ready.parts,
        )
        self._evaluations = Evaluations(
            self._store,
            self._committer,
            self._history,
            request=ready.eval_request,
            every_steps=ready.record.config.task.evaluation.every_steps,
            total_steps=self._total,
            live=live,
            event=self._report.event,
            on_score=self._report.evaluated,
        )
        self._ingestor = Ingestor(
            self._store,
            binding(ready.record, ready.prompts, self._learner.policy.model),
            lowest_unswept_window=ready.book.ingest_state.lowest_unswept_window,
            commit=lambda: self._committer.latest.commit,
            is_ingested=lambda shard: self._book.contains(shard),
            starved=lambda: self._waiting is not None,
            poll_seconds=lambda: self._colocated.poll_seconds(live().sync.poll_interval_seconds),
            searcher_poll_seconds=lambda: live().sync.poll_interval_seconds,
            give_up_seconds=give_up,
            foreign=ready.facts.foreign,
        )
        self._intake = Intake(
            self._learner,
            self._ingestor,
            self._ingest_log,
            self._report,
            facts=ready.facts,
            begun_with=ready.record.live,
            live=live,
        )
        publishing, saving = self._publisher.background, self._checkpointer.background
        self._backgrounds = (publishing, saving, self._keeping.commits, self._keeping.garbage)
        others = (self._ingestor, self._evaluations.gathering, self._flusher)
        self._threads = (publishing, saving, self._keeping.commits, *others, self._keeping.garbage)

    # -- the flow

    def run(self) -> None:
        """Train to the last step, wait for the last evaluation, end the run.

        Raises: Fenced, StoreUnavailable or AccessDenied that did not pass, Terminated (after a checkpoint, if one fits
        the grace).
        """
        try:
            self._begin()
            while self._learner.step < self._total:
                self._check_stop()
                self._housekeeping()
                with self._phases.piece("ingest"):
                    self._take_rows()
                live = self._intake.follow()
                reason = self._learner.waiting_for(live)
                if reason is not None:
                    self._wait(reason)
                else:
                    self._train_step(live)
            self._end()
        finally:
            self._close()

    def _begin(self) -> None:
        self._colocated.tick()  # its imports take a while
        event = "started" if self._ready.fresh else "resumed"
        log.info(RUN_STARTED if self._ready.fresh else RUN_RESUMED, epoch=self._epoch, step=self._book.step)
        self._report.event(event, f"epoch {self._epoch} at step {self._book.step}")
        for lost in self._ready.lost:
            self._intake.quarantine(lost.key, lost.reason)
            self._report.event("shard_lost", f"{lost.num_rows} rows of {lost.key}: {lost.reason}")
        self._flusher.start()
        self._evaluations.gathering.start()
        wanted = self._committer.latest.evaluation
        # A fallback to an older checkpoint may have rolled back further than the take-over knew.
        if wanted is not None and WeightsKey.parse(wanted).version <= self._book.step:
            self._evaluations.resume(wanted)
        elif not self._ready.fresh:
            self._evaluations.recover(
                self._book.step,
                known=dict(self._book.scores),
                survives=lambda policy: self._book.effective_version(policy) == policy.version,
            )
        # Searchers follow the restored weights at once; a fresh run shows version 0.
        evaluate = self._ready.fresh or self._learner.step == self._total
        self._publish(self._ready.eval_request if evaluate else None)
        self._join(self._publisher.background)
        if self._ready.fresh:
            self._checkpoint()
            self._join(self._checkpointer.background)
        self._ingestor.start()

    def _train_step(self, live: LiveConfig) -> None:
        if self._waiting is not None:
            self._report.continued(self._waiting)
            log.info(DATA_ARRIVED, waited_seconds=round(self._phases.seconds("wait_data"), 2))
            self._waiting = None
        with self._phases.piece("wait_engine"):
            self._colocated.sleep()
        self.tracker.state, self.tracker.detail = "Training", self._outage()
        started = time.monotonic()
        with trace.span("train_step", step=self._learner.step + 1):
            result = self._learner.train_step(live, self._epoch)
            trace.lay_out(result.phase_seconds)
        self._intake.stepped()
        step = self._learner.step
        failpoint("step.after_update")
        timing = self._phases.stepped(time.monotonic() - started, result.phase_seconds)
        self._learner.counters.wall_seconds += timing.total_seconds
        self._book = self._book.stepped(timing.total_seconds)
        self._report.stepped(result, timing, published_version=self._published_version)
        if self._on_step is not None:
            self._on_step(result)
        self._heartbeat.beat()
        evaluation = self._evaluations.request_for(step)
        if step % live.sync.interval_steps == 0 or evaluation is not None or step == self._total:
            self._publish(evaluation)
        # A moving average changes at every step: it travels in the checkpoints that are due anyway.
        reset = result.reference_changed and self._learner.policy.caches_reference
        if step % live.storage.checkpoints.every_steps == 0 or step == self._total or reset:
            self._checkpoint()

    def _end(self) -> None:
        """The last weights are published and checkpointed: wait for their evaluation, then close the run for good."""
        self._join(self._publisher.background)
        self._join(self._checkpointer.background)
        self._apply_results()
        self.tracker.state, self.tracker.alarms.data_since = "Evaluating", None
        while (awaited := self._evaluations.describe()) is not None:
            self._check_stop()
            self._housekeeping()
            self._colocated.wake()  # it may be the only one who answers
            self.tracker.detail = self._outage() or awaited
            self._heartbeat.beat()
            time.sleep(0.1)
        self._apply_results()
        self._report.summarise()
        self._report.event("finished", f"step {self._learner.step}")
        self._join(self._keeping.commits)
        self._keeping.commits.submit(self._finish)
        self._join(self._keeping.commits)
        self.tracker.state, self.tracker.detail = "Complete", ""
        log.info(RUN_FINISHED, step=self._learner.step, eval_score=self.tracker.eval_score)

    def _finish(self) -> None:
        for journal in (self._ingest_log, self._history):
            journal.seal()
            journal.flush()
        try:
            self._committer.commit(lambda current, nonce: finished(current, RunState.COMPLETE, nonce))
        except RunEnded:  # by us: a try before this one has landed, though no reply said so
            log.info(RUN_FINISHED, detail="seen in storage")

    def _close(self) -> None:
        self._ingestor.close()
        self._evaluations.gathering.close()
        self._flusher.close()
        for background in self._backgrounds:
            background.close()
        self._colocated.close()

    # -- rows in

    def _take_rows(self, timeout_seconds: float = 0.0) -> None:
        waiting = self._waiting is not None
        self._book = self._intake.take(self._book, waiting=waiting, timeout_seconds=timeout_seconds)
        self.tracker.alarms.data_since = self._intake.arrived_at
        self.tracker.heard_of(self._learner.counters.searchers.values(), time.time())
        self.tracker.trajectories = self._learner.counters.ingested_rows
        self._report.summarise_if_due()

    def _wait(self, reason: str) -> None:
        self._colocated.wake()
        if reason != self._waiting:
            if self._waiting is None:
                self._ingestor.poll_now()
            log.info(DATA_AWAITED, reason=reason)
            self._waiting = reason
        self._report.waiting("waiting", reason)
        self.tracker.state, self.tracker.detail = "WaitingForData", self._describe_wait(reason)
        with self._phases.piece("wait_data"):
            self._take_rows(min(0.5, self._live().sync.poll_interval_seconds))
        self._heartbeat.beat()

    def _describe_wait(self, reason: str) -> str:
        outage = self._outage()
        if outage:
            return f"{reason}; {outage}"
        silent = time.monotonic() - self._intake.last_arrival
        stalled = silent > self._live().sync.stall_timeout_seconds
        trouble = f"; {self._colocated.trouble}" if self._colocated.trouble else ""
        return f"{reason}; no shard for {silent:.0f} s" + (" (SyncStalled)" if stalled else "") + trouble

    # -- weights and state out

    def _publish(self, evaluation: EvalRequest | None) -> None:
        self._join(self._publisher.background)
        before = self._phases.seconds("stage")
        with self._phases.piece("stage"):
            adapter = self._adapter()
            policy = self._learner.policy
            owners = (0,) if self._ready.parts is None else self._ready.parts.owners
            tensors = policy.stage(owners) if adapter is None else policy.master_state()
        staged = self._phases.seconds("stage") - before
        telemetry.SYNC_SECONDS.labels("stage").observe(staged)
        self._publisher.publish(
            tensors,
            version=self._learner.step,
            epoch=self._epoch,
            evaluation=evaluation,
            stage_seconds=staged,
            adapter=adapter,
        )

    def _adapter(self) -> AdapterOf | None:
        """What the next snapshot's tensors are an adapter of; None: they are whole weights, as version 0's always."""
        lora = self._ready.record.config.model.lora
        if lora is None or self._version0 is None or self._learner.step == 0:
            return None
        return AdapterOf(self._version0, scale_of(lora))

    def _after_publish(self, done: Published) -> None:
        """In the publish thread."""
        self._report.published(done.row)
        self._published_version = done.manifest.version
        self._intake.shards_since_commit = 0
        if done.manifest.version == 0 and self._version0 is None:
            self._version0 = done.key
        if done.manifest.evaluation is not None:
            self._evaluations.announced(done.key, done.manifest.evaluation)

    def _checkpoint(self) -> None:
        """Capture now; upload and commit beside the loop. The ingest log it belongs to is durable before it."""
        self._join(self._checkpointer.background)
        self._apply_results()
        started = time.monotonic()
        with self._phases.piece("capture"):
            self._book = self._book.swept(self._ingestor.durable_window()).logged(
                ingest_log_seq=self._ingest_log.seal(), metrics_log_seq=self._history.seal()
            )
            state = self._learner.state()
        intake = self._intake
        facts = LoopFacts(self._version0, intake.open_entries, intake.foreign, intake.followed)
        detached = TrainerState(state.tensors, {**state.facts, **facts.to_json()})
        self._checkpointer.save(self._book.manifest(new_nonce(), []), detached, captured=started)

    # -- now and then

    def _housekeeping(self) -> None:
        for thread in self._threads:
            thread.check()
        self._apply_results()
        self._keeping.tick(self._intake)
        self._colocated.tick()
        self.tracker.alarms.stall_timeout_seconds = self._live().sync.stall_timeout_seconds

    def _apply_results(self) -> None:
        for key in self._checkpointer.take_committed():
            self._book = self._book.checkpointed(key)
            self.tracker.checkpoint_step = CheckpointKey.parse(key).step
        for step, score in self._evaluations.take_scores():
            self._book = self._book.evaluated(step, score)
            self.tracker.eval_score = self._book.eval_score

    def _outage(self) -> str:
        """Which storage trouble lasts, in words; empty if there is none."""
        return next((text for thread in self._threads if (text := thread.outage.description)), "")

    def _join(self, background: Background) -> None:
        """Wait for a background task, visibly. Raises: Terminated if SIGTERM came and storage does not answer."""
        told, started = False, time.monotonic()
        while not self._joined(background):
            outage = background.outage.description
            trouble = outage or self.tracker.alarms.storage_trouble(time.time())
            slow = self.tracker.state != "Starting" and time.monotonic() - started > SLOW_SECONDS
            if trouble or slow:
                told, reason = True, trouble or "the publish or checkpoint before is still being uploaded"
                self.tracker.state, self.tracker.detail = "WaitingForStorage", reason
                self._report.waiting("waiting_storage", reason)
            if outage and self._stop.is_set():
                log.warning(CHECKPOINT_SKIPPED, reason=outage)
                raise Terminated
            self._keeping.sweep_if_due()
            self._heartbeat.beat()
        if told:
            self._report.continued("storage")

    def _joined(self, background: Background) -> bool:
        with self._phases.piece("wait_storage"):
            return background.join(0.5)

    def _check_stop(self) -> None:
        if self._stop.since is None:
            return
        self._colocated.stop()
        self._join(self._checkpointer.background)
        self._apply_results()
        left = self._grace_seconds - (time.monotonic() - self._stop.since)
        if self._checkpointer.last_seconds <= left:
            self._checkpoint()
            self._join(self._checkpointer.background)
            self._apply_results()
        else:
            log.warning(
                CHECKPOINT_SKIPPED,
                reason=f"the last took {self._checkpointer.last_seconds:.0f} s, {left:.0f} s of the grace are left",
            )
        self._report.event("stopped", "asked to end: stopped between two steps")
        self._history.seal()
        try:
            self._history.flush()
        except PASSING as error:
            log.warning(STORAGE_FAILED, task="journal", error=str(error))
        raise Terminated
