"""What the training loop tells: history rows, metrics, `/progress` and the log."""

import math
import re
import time
from collections.abc import Callable

from tba import telemetry
from tba.contracts.base import Contract
from tba.contracts.config import LiveConfig
from tba.contracts.history import EvalRow, EventRow, PublishRow, QuarantineRow
from tba.log import HOLD_WEAKENED, REFERENCE_CHANGED, SHARD_QUARANTINED, STEP_COMPLETED, log
from tba.shards import ShardBatch
from tba.trainer.journal import Journal
from tba.trainer.learner import Learner, StepResult
from tba.trainer.phases import Timing
from tba.trainer.progress import WEAK_HOLD, StepMetrics, Tracker, sample_row, step_row
from tba.trainer.work import StepWork

ROWS_EVERY_STEPS = 10
ROWS_SECONDS = 30.0
"""Rows about searchers are at most so old while any deliver, however slow steps are and before the first one: the
bucket is all that `tba status` has."""
WAITING_SECONDS = 60.0
"""A wait is told anew after so long: a run without a row for two minutes is taken for dead."""
SAMPLES = 200
"""Of a whole run."""


class Reporter:
    """`event`, `published` and `evaluated` may be called by any thread; the rest is for the loop."""

    def __init__(
        self,
        history: Journal,
        learner: Learner,
        tracker: Tracker,
        *,
        epoch: int,
        decode: Callable[[list[int]], str],
        live: Callable[[], LiveConfig],
    ) -> None:
        self._history = history
        self._learner = learner
        self._tracker = tracker
        self._epoch = epoch
        self._decode = decode
        self._live = live
        self._metrics = StepMetrics(learner.sampler.mop_recycles, learner.counters.trained_tokens)
        self._work = StepWork(learner)
        self._rows_at = -math.inf  # monotonic seconds
        self._waiting = ""  # what was told last, without its numbers
        self._waiting_at = -math.inf

    def event(self, event: str, detail: str = "") -> None:
        """Something happened to the run."""
        row = EventRow(epoch=self._epoch, step=self._learner.step, time=time.time(), event=event, detail=detail)
        self._history.append(row)

    def waiting(self, event: str, reason: str) -> None:
        """The loop waits. Told once, again when the reason changes in more than its numbers, and now and then."""
        now, shape = time.monotonic(), event + re.sub(r"\d+", "", reason)
        if shape != self._waiting or now - self._waiting_at >= WAITING_SECONDS:
            self._waiting, self._waiting_at = shape, now
            self.event(event, reason)

    def continued(self, waited_for: str) -> None:
        """The wait is over."""
        self._waiting = ""
        self.event("continued", waited_for)

    def quarantined(self, key: str, reason: str) -> None:
        """A shard was refused."""
        log.error(SHARD_QUARANTINED, key=key, reason=reason)
        row = QuarantineRow(epoch=self._epoch, step=self._learner.step, time=time.time(), key=key, reason=reason)
        self._history.append(row)

    def stepped(self, result: StepResult, timing: Timing, *, published_version: int) -> None:
        """An optimizer step is done."""
        row = step_row(
            self._learner, result, timing, epoch=self._epoch, published_version=published_version,
            model_flops=self._work.flops(result), peak_flops=self._work.peak_flops,
        )  # fmt: skip
        self._history.append(row)
        self._metrics.record(row)
        self._tracker.stepped(row)
        self.judged_signal()
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
            self.summarise()
        if row.step % max(1, self._tracker.total_steps // SAMPLES) == 0:
            self._sample(result)

    def published(self, row: PublishRow) -> None:
        """A snapshot is visible."""
        self._history.append(row)
        self._tracker.policy_version = row.version
        telemetry.SNAPSHOT_BYTES.labels(row.encoding).set(row.total_bytes)
        telemetry.SYNC_SECONDS.labels("upload").observe(row.upload_seconds)
        telemetry.SYNC_SECONDS.labels("commit").observe(row.commit_seconds)

    def evaluated(self, row: EvalRow) -> None:
        """An evaluation is complete."""
        if row.step == 0 and row.samples > 1:  # one sample tells little of what K would find
            self._tracker.alarms.first_pass_at_k = row.pass_at_k

    def judged_signal(self) -> None:
        """Whether the groups trained on so far, also by earlier trainers, give anything to learn from."""
        counters = self._learner.counters
        groups_per_batch = self._learner.config.objective.prompts_per_batch
        self._tracker.alarms.learned(counters.signal_groups, counters.trained_groups, groups_per_batch)

    def delivered(self, batch: ShardBatch) -> None:
        """A searcher's shard has been ingested."""
        header = batch.header
        up_seconds = header.stats.get("up_seconds", 0.0)
        self._tracker.delivered(
            header.searcher, header.incarnation, len(batch), up_seconds=up_seconds, now=time.monotonic()
        )

    def summarise_if_due(self) -> None:
        """The same as `summarise`, every `ROWS_SECONDS` at the most; the first rows at once."""
        if time.monotonic() - self._rows_at >= ROWS_SECONDS:
            self.summarise()

    def summarise(self) -> None:
        """Rows about searchers and lengths, as far as they have changed."""
        now, counters = time.time(), self._learner.counters
        rows: list[Contract | None] = [
            *counters.take_searcher_rows(epoch=self._epoch, step=self._learner.step, now=now),
            counters.take_length_row(epoch=self._epoch, step=self._learner.step, now=now),
        ]
        for row in rows:
            if row is not None:
                self._history.append(row)
                self._rows_at = time.monotonic()
        self._tracker.heard_of(counters.searchers.values(), now)

    def _sample(self, result: StepResult) -> None:
        slot = (result.plan.step * 7919) % len(result.plan.rows)
        buffer = self._learner.buffer
        prompt = self._decode(buffer.prompt_tokens(int(result.plan.prompt_ids[slot])).tolist())
        response = self._decode(buffer.tokens(int(result.plan.rows[slot, 0])).tolist())
        self._history.append(
            sample_row(self._learner, result, epoch=self._epoch, prompt=prompt, response=response, slot=slot)
        )
