"""Rows of the run history (`metrics/`): written by the trainer, read by status, watch and report."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from tba.contracts.base import Contract


class Row(Contract):
    """What every row says. A row of epoch e beyond the resume step of a later epoch is a discarded future."""

    epoch: int
    step: int
    time: float
    """Seconds since the Unix epoch."""


class StepRow(Row):
    """One optimizer step."""

    kind: Literal["step"] = "step"
    wall_seconds: float
    """Since the start of the run, over all attempts."""
    step_seconds: float
    wait_data_seconds: float
    wait_storage_seconds: float
    score_seconds: float
    """Reference log-probabilities."""
    train_seconds: float
    """Forward, backward and optimizer."""
    loss: float
    reward_mean: float
    """Of the batch."""
    generated_reward_mean: float | None
    """Of all rows ingested since the last step, before de-duplication."""
    log_z: float
    kl: float
    """Mean over the batch of the summed log-ratio to the reference, nats a response."""
    ell_std: float
    """Mean within-group standard deviation of the same."""
    beta: float
    beta_ratio: float
    """beta * std(ell) / std(reward); 0 if rewards do not vary."""
    signal_groups_fraction: float
    """Groups whose rewards differ."""
    ess: float
    """Effective sample size of the weights as a share of the batch, (0, 1]."""
    grad_norm: float
    """Before clipping."""
    grad_clipped: bool
    learning_rate: float
    staleness: dict[int, int]
    """Steps -> rows of this batch."""
    replay_slots: int
    """Prompt slots that took the replay branch."""
    slots: int
    with_replacement: int
    """Slots drawn with replacement."""
    mop_recycles: int
    """Times the most-on-policy pool was exhausted and recycled, cumulative."""
    trained_rows: int
    """Cumulative."""
    trained_tokens: int
    """Response tokens, cumulative."""
    ingested_rows: int
    """Before de-duplication, cumulative."""
    generated_tokens: int
    """Response tokens ingested, cumulative."""
    duplicate_rows: int
    """Cumulative."""
    failed_rows: int
    """Rows without a reward (failed or timed out), cumulative."""
    quarantined_shards: int
    """Cumulative."""
    replay_ratio: float
    buffer_rows: int
    buffer_bytes: int
    published_version: int
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    """All the time since the step before, by phase; empty in rows of older versions."""
    scored_tokens: int = 0
    """Prompt and response tokens of this step's reference pass."""
    model_flops: float | None = None
    """Of this step: reference, forward and backward pass, without recomputation; null: unknown kind of model."""
    peak_flops: float | None = None
    """What the trainer's GPUs could do a second; null: unknown."""

    @property
    def span_seconds(self) -> float:
        """Since the step before."""
        waits = self.wait_data_seconds + self.wait_storage_seconds
        return sum(self.phase_seconds.values()) if self.phase_seconds else self.step_seconds + waits


class EvalRow(Row):
    """One complete evaluation of a snapshot. `step` is its version."""

    kind: Literal["eval"] = "eval"
    policy_epoch: int
    num_prompts: int
    samples: int
    sampling: Literal["greedy", "sample"]
    pass_at_1: float
    pass_at_k: float
    standard_error: float
    """Of pass_at_1, over prompts."""
    failed: int
    """Responses without a reward; left out of the means."""
    mean_response_tokens: float


class PublishRow(Row):
    """One snapshot made visible."""

    kind: Literal["publish"] = "publish"
    version: int
    encoding: Literal["full", "delta", "adapter"]
    total_bytes: int
    stage_seconds: float
    upload_seconds: float
    commit_seconds: float


class SearcherRow(Row):
    """What the trainer knows of a searcher from its shards."""

    kind: Literal["searcher"] = "searcher"
    searcher: str
    incarnation: str
    shards: int
    rows: int
    failed: int = 0
    """Of the rows, those without a reward."""
    tokens: int
    versions: int
    """Distinct policies seen in its spans."""
    newest_version: int
    first_seen: float
    last_seen: float
    stats: dict[str, float]
    """Counters of the searcher's last shard header, cumulative since its start."""


class QuarantineRow(Row):
    """A shard that was refused."""

    kind: Literal["quarantine"] = "quarantine"
    key: str
    reason: str


class SampleRow(Row):
    """A trained response, for reading."""

    kind: Literal["sample"] = "sample"
    prompt: str
    response: str
    reward: float
    version: int
    searcher: str


class EventRow(Row):
    """Something that happened to the run: started, resumed, waiting, continued, settings, checkpoint, stopped, ..."""

    kind: Literal["event"] = "event"
    event: str
    detail: str = ""


class LengthRow(Row):
    """Response-length histograms so far: token count -> rows."""

    kind: Literal["lengths"] = "lengths"
    generated: dict[int, int]
    trained: dict[int, int]


AnyRow = Annotated[
    StepRow | EvalRow | PublishRow | SearcherRow | QuarantineRow | SampleRow | EventRow | LengthRow,
    Field(discriminator="kind"),
]
ROW = TypeAdapter[AnyRow](AnyRow)


class Alert(Contract):
    """Something wrong with a run that its trainer sees; a condition of the job."""

    reason: Literal["SyncStalled", "NoRewardSignal", "StorageUnreachable"]
    message: str
    """What, got, remedy."""


class Progress(Contract):
    """`/progress` of the trainer: status.progress of the job, and what a person watches."""

    run_id: str
    """Empty while the trainer starts: it has not claimed the run yet."""
    pod_uid: str | None = None
    state: Literal["Starting", "WaitingForData", "Training", "WaitingForStorage", "Evaluating", "Complete", "Failed"]
    detail: str = ""
    """What is awaited, in words."""
    epoch: int
    step: int
    total_steps: int
    percentage: float
    policy_version: int
    reward: float | None
    """Mean of the responses that arrived since the step before, or of the last ones that did."""
    eval_score: float | None
    staleness_mean: float | None
    trainer_idle_percent: float | None
    trajectories: int
    replay_ratio: float | None
    eta_seconds: float | None
    searchers: int
    """Incarnations heard of in the last 60 s; in a cluster those of the job's StatefulSet. For the autoscaler."""
    last_updated_time: float
    checkpoint_step: int | None = None
    """Of the newest durable checkpoint; null: none yet."""
    steps_per_busy_second: float | None = None
    """Optimizer steps per second of not waiting, over the last minutes; null until known. For the autoscaler."""
    trajectories_per_searcher_second: float | None = None
    """Rows ingested per second and one of `searchers`, over the last minutes; null until known. For the autoscaler."""
    alerts: list[Alert] = Field(default_factory=list)
