"""From a step's result to history row, metrics and the `/progress` answer. Pure but for the metrics registry."""

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from tba import telemetry
from tba.contracts.history import Progress, SampleRow, StepRow
from tba.contracts.records import Latest
from tba.protocol.liveness import Heard, searchers_alive
from tba.trainer.alarms import Alarms
from tba.trainer.colocated import NAME as COLOCATED
from tba.trainer.learner import Learner, StepResult
from tba.trainer.phases import Timing
from tba.trainer.rates import Rates

WEAK_HOLD = 0.05
"""Below this beta * std(ell) / std(r), beta no longer holds a lagging policy."""

ETA_STEPS = 20
"""Steps whose pace is taken for that of the rest."""

CLIP_STEPS = 100
"""Steps over which the share of clipped gradients is taken."""


def step_row(
    learner: Learner,
    result: StepResult,
    timing: Timing,
    *,
    epoch: int,
    published_version: int,
    model_flops: float | None = None,
    peak_flops: float | None = None,
) -> StepRow:
    """The history row of a step."""
    counters, plan, phases = learner.counters, result.plan, timing.phase_seconds
    used = result.weights > 0
    multiplicity = np.where(used, plan.weights, 0.0)
    total = float(multiplicity.sum())
    ratio = np.divide(result.weights, multiplicity, out=np.zeros_like(result.weights), where=used)
    mean_ell = _group_mean(result.ell, multiplicity)
    mean_reward = _group_mean(result.rewards, multiplicity)
    ell_std = _group_std(result.ell, mean_ell, multiplicity)
    reward_std = _group_std(result.rewards, mean_reward, multiplicity)
    spread = float(reward_std.mean())
    lags, counts = np.unique(plan.staleness, return_counts=True)
    return StepRow(
        epoch=epoch,
        step=learner.step,
        time=time.time(),
        wall_seconds=counters.wall_seconds,
        step_seconds=timing.step_seconds,
        wait_data_seconds=phases.get("wait_data", 0.0),
        wait_storage_seconds=phases.get("wait_storage", 0.0),
        score_seconds=phases.get("reference", 0.0),
        train_seconds=phases.get("forward_backward", 0.0) + phases.get("optimizer", 0.0),
        loss=result.loss,
        reward_mean=float((result.rewards * multiplicity).sum() / total),
        generated_reward_mean=counters.take_reward_mean(),
        log_z=float(result.log_z.mean()),
        kl=float((result.ell * multiplicity).sum() / total),
        ell_std=float(ell_std.mean()),
        beta=result.beta,
        beta_ratio=result.beta * float(ell_std.mean()) / spread if spread > 0 else 0.0,
        signal_groups_fraction=float((reward_std > 1e-6).mean()),
        ess=float((multiplicity * ratio).sum() ** 2 / (total * (multiplicity * ratio**2).sum())),
        grad_norm=result.update.grad_norm,
        grad_clipped=result.update.clipped,
        learning_rate=result.update.learning_rate,
        staleness=dict(zip(lags.tolist(), counts.tolist(), strict=True)),
        replay_slots=int(plan.replay.sum()),
        slots=len(plan.replay),
        with_replacement=int(plan.with_replacement.sum()),
        mop_recycles=plan.mop_recycles,
        trained_rows=counters.trained_rows,
        trained_tokens=counters.trained_tokens,
        ingested_rows=counters.ingested_rows,
        generated_tokens=counters.generated_tokens,
        duplicate_rows=counters.duplicate_rows,
        failed_rows=counters.failed_rows,
        quarantined_shards=counters.quarantined_shards,
        replay_ratio=learner.sampler.replay_ratio(learner.buffer),
        buffer_rows=len(learner.buffer),
        buffer_bytes=learner.buffer.memory_bytes,
        published_version=published_version,
        phase_seconds=phases,
        scored_tokens=result.scored_tokens,
        model_flops=model_flops,
        peak_flops=peak_flops,
    )


class StepMetrics:
    """Sets the Prometheus metrics of a step (interface.md §4)."""

    def __init__(self, mop_recycles: int, trained_tokens: int = 0) -> None:
        """Both: of the run before this process, whose counters start at 0."""
        self._mop_recycles = mop_recycles
        self._trained_tokens = trained_tokens
        self._clipped: deque[bool] = deque(maxlen=CLIP_STEPS)

    def record(self, row: StepRow) -> None:
        """Take over a finished step."""
        _set_gauges(row)
        self._clipped.append(row.grad_clipped)
        telemetry.GRAD_CLIP_FRACTION.set(sum(self._clipped) / len(self._clipped))
        telemetry.MOP_RECYCLES.inc(row.mop_recycles - self._mop_recycles)
        self._mop_recycles = row.mop_recycles
        telemetry.TRAINED_TOKENS.inc(row.trained_tokens - self._trained_tokens)
        self._trained_tokens = row.trained_tokens
        telemetry.MODEL_FLOPS.inc(row.model_flops or 0.0)
        telemetry.PEAK_FLOPS.set(row.peak_flops or 0.0)
        for lag, count in row.staleness.items():
            for _ in range(count):
                telemetry.STALENESS.observe(lag)


def _set_gauges(row: StepRow) -> None:
    telemetry.STEP.set(row.step)
    telemetry.LOSS.set(row.loss)
    telemetry.REWARD_MEAN.set(row.reward_mean)
    telemetry.LOG_Z.set(row.log_z)
    telemetry.KL.set(row.kl)
    telemetry.ELL_STD.set(row.ell_std)
    telemetry.BETA_RATIO.set(row.beta_ratio)
    telemetry.SIGNAL_GROUPS_FRACTION.set(row.signal_groups_fraction)
    telemetry.ESS.set(row.ess)
    telemetry.GRAD_NORM.set(row.grad_norm)
    telemetry.REPLAY_RATIO.set(row.replay_ratio)


def sample_row(learner: Learner, result: StepResult, *, epoch: int, prompt: str, response: str, slot: int) -> SampleRow:
    """A trained response for people to read."""
    row = result.plan.rows[slot, 0]
    return SampleRow(
        epoch=epoch,
        step=learner.step,
        time=time.time(),
        prompt=prompt,
        response=response,
        reward=float(result.rewards[slot, 0]),
        version=int(learner.buffer.versions(np.array([row]))[0]),
        searcher=learner.searcher_of(int(row)),
    )


@dataclass(slots=True)
class Tracker:
    """What `/progress` answers; the loop updates it, HTTP threads read copies.

    Made before the run is claimed: run id and epoch are told then.
    """

    total_steps: int
    pod_uid: str | None = None
    searcher_set: str | None = None
    """StatefulSet of the job's searchers; null: whoever delivers is one of them."""
    run_id: str = ""
    epoch: int = 0
    state: str = "Starting"
    detail: str = ""
    step: int = 0
    policy_version: int = 0
    eval_score: float | None = None
    last_row: StepRow | None = None
    generated_reward: float | None = None
    trajectories: int = 0
    searchers: int = 0
    idle_seconds: float = 0.0
    span_seconds: float = 0.0
    """Both without the run's first step: the start is left out, as in `tba.report.split`."""
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_STEPS))
    """Seconds of the last steps, waits included."""
    checkpoint_step: int | None = None
    rates: Rates = field(default_factory=Rates)
    alarms: Alarms = field(default_factory=Alarms)

    @classmethod
    def of(cls, total_steps: int, environ: Mapping[str, str]) -> Self:
        """With what the operator tells a pod."""
        return cls(total_steps, environ.get("TBA_POD_UID"), environ.get("TBA_SEARCHER_SET") or None)

    def claimed(
        self,
        *,
        run_id: str,
        epoch: int,
        step: int,
        eval_score: float | None,
        trajectories: int,
        checkpoint_step: int | None = None,
    ) -> None:
        """The run is this trainer's, restored or begun at `step`."""
        self.run_id, self.epoch, self.step = run_id, epoch, step
        self.eval_score, self.trajectories, self.checkpoint_step = eval_score, trajectories, checkpoint_step

    def delivered(self, searcher: str, incarnation: str, rows: int, *, up_seconds: float, now: float) -> None:
        """A searcher process delivered rows, `up_seconds` after its start. `now`: of `time.monotonic`."""
        if self._measures(searcher):
            self.rates.delivered(incarnation, rows, up_seconds, now)

    def heard_of(self, processes: Iterable[Heard], now: float) -> None:
        """All searcher processes that are known. `now`: Unix seconds."""
        self.searchers = searchers_alive([p for p in processes if self._measures(p.searcher)], now)

    def _measures(self, searcher: str) -> bool:
        """Whether the autoscaler may conclude from this one what another would bring: only from those that it starts.

        Not from the trainer's own, which sleeps most of the time, nor from one that somebody runs elsewhere: it may
        have another GPU, and it is no pod, while the speed is trusted only as long as no more deliver than pods are.
        """
        if searcher == COLOCATED:
            return False
        return self.searcher_set is None or re.fullmatch(rf"{re.escape(self.searcher_set)}-\d+", searcher) is not None

    def found_complete(self, run_id: str, latest: Latest) -> None:
        """An earlier trainer has ended the run."""
        self.run_id, self.epoch, self.step = run_id, latest.epoch, latest.step
        self.policy_version, self.state, self.detail = latest.version, "Complete", ""

    def failed(self, error: str) -> None:
        """Nothing but the user can help."""
        self.state, self.detail = "Failed", error

    def stepped(self, row: StepRow) -> None:
        """Take over a finished step."""
        begun, self.last_row = self.last_row is not None, row
        if row.generated_reward_mean is not None:
            self.generated_reward = row.generated_reward_mean
        self.step = row.step
        waited = row.wait_data_seconds + row.wait_storage_seconds
        busy = max(row.span_seconds - waited, 0.0)
        if row.step > 1:
            self.idle_seconds += sum(s for phase, s in row.phase_seconds.items() if phase.startswith("wait_"))
            self.span_seconds += row.span_seconds
        if begun:  # the first of a process holds the wait for its first rows
            self.paces.append(row.span_seconds)
        self.trajectories = row.ingested_rows
        self.rates.stepped(busy, time.monotonic())

    def progress(self) -> Progress:
        """A copy of now."""
        row = self.last_row
        lags = row.staleness if row else {}
        return Progress(
            run_id=self.run_id,
            pod_uid=self.pod_uid,
            state=self.state,  # type: ignore[arg-type]
            detail=self.detail,
            epoch=self.epoch,
            step=self.step,
            total_steps=self.total_steps,
            percentage=100.0 * self.step / self.total_steps,
            policy_version=self.policy_version,
            # What searchers make now: a batch may hold replayed rows, chosen by their rewards.
            reward=self.generated_reward,
            eval_score=self.eval_score,
            staleness_mean=sum(k * v for k, v in lags.items()) / sum(lags.values()) if lags else None,
            trainer_idle_percent=100.0 * self.idle_seconds / self.span_seconds if self.span_seconds else None,
            trajectories=self.trajectories,
            replay_ratio=row.replay_ratio if row else None,
            eta_seconds=sum(self.paces) / len(self.paces) * (self.total_steps - self.step) if self.paces else None,
            searchers=self.searchers,
            last_updated_time=time.time(),
            checkpoint_step=self.checkpoint_step,
            steps_per_busy_second=self.rates.steps_per_busy_second(),
            trajectories_per_searcher_second=self.rates.trajectories_per_searcher_second(time.monotonic()),
            alerts=[] if self.state == "Complete" else self.alarms.alerts(time.time()),
        )


def _group_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:  # (P, K) -> (P, 1)
    return (values * weights).sum(1, keepdims=True) / weights.sum(1, keepdims=True)


def _group_std(values: np.ndarray, mean: np.ndarray, weights: np.ndarray) -> np.ndarray:  # -> (P,)
    return np.sqrt(((values - mean) ** 2 * weights).sum(1) / weights.sum(1))
