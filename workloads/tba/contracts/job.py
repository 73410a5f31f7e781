"""The TBAJob resource: run configuration plus placement (interface.md §1). Placement knows nothing of torch."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tba.contracts.base import Contract
from tba.contracts.config import (
    Buffer,
    ForkFrom,
    LiveConfig,
    Model,
    Objective,
    RunConfig,
    SearcherSettings,
    Storage,
    Sync,
    Task,
    TrainerSettings,
)

API_VERSION = "tba.dev/v1alpha1"
KIND = "TBAJob"
MAX_NAME_LENGTH = 40


class PodTemplate(Contract):
    """Strategic additions to a role's pod."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: dict[str, Any] = Field(default_factory=dict)


class Container(Contract):
    """Container fields of either role."""

    image: str | None = None
    """null: the operator's default."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: list[dict[str, str]] = Field(default_factory=list)
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    env: list[dict[str, Any]] = Field(default_factory=list)
    env_from: list[dict[str, Any]] = Field(default_factory=list)
    resources: dict[str, Any] = Field(default_factory=dict)
    pod_template: PodTemplate = PodTemplate()


class ColocatedSearcher(Contract):
    """An engine inside the trainer pod that works while the trainer is starved."""

    enabled: Literal["auto"] | bool = "auto"
    memory_fraction: float = Field(default=0.4, gt=0, lt=1)


class Trainer(Container, TrainerSettings):
    """The trainer pod. Immutable unless the job is suspended."""

    gpus_per_node: int | None = Field(default=None, ge=0)
    """null: 1, or 0 with a CPU engine."""
    nodes: int = Field(default=1, ge=1)
    colocated_searcher: ColocatedSearcher = ColocatedSearcher()
    termination_grace_period_seconds: int = Field(default=600, ge=0)


class Autoscaling(Contract):
    """Who decides the number of searchers."""

    mode: Literal["Static", "External", "Managed"] = "Static"
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    target_replay_ratio: float = Field(default=1.0, gt=0)
    stabilization_seconds: int = Field(default=300, ge=0)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.mode == "Managed" and self.max_replicas is None:
            raise ValueError("maxReplicas is required with mode Managed")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"maxReplicas must be >= minReplicas ({self.min_replicas}), got {self.max_replicas}")
        return self


class Searcher(Container, SearcherSettings):
    """The searcher pods."""

    replicas: int = Field(default=1, ge=0, le=4096)
    min_available: int = Field(default=1, ge=0)
    autoscaling: Autoscaling = Autoscaling()
    pod_disruption_budget: bool = True
    termination_grace_period_seconds: int = Field(default=60, ge=0)


class FailureRule(Contract):
    """What to do when a trainer container ends with one of these exit codes."""

    action: Literal["FailJob", "Ignore", "Count"]
    on_exit_codes: list[int] = Field(min_length=1)


class RunPolicy(Contract):
    """Life cycle of the job."""

    backoff_limit: int = Field(default=6, ge=0)
    """Attempts that made no new checkpoint before the job fails."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    startup_deadline_seconds: int = Field(default=3600, ge=1)
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    cleanup_policy: Literal["None", "Running", "All"] = "Running"
    priority_class_name: str | None = None
    failure_rules: list[FailureRule] = Field(default_factory=list)


class JobSpec(Contract):
    """Everything a user says about a run."""

    suspend: bool = False
    managed_by: str = "tba.dev/tbajob-controller"
    model: Model
    task: Task
    objective: Objective = Objective()
    buffer: Buffer = Buffer()
    sync: Sync = Sync()
    storage: Storage
    trainer: Trainer = Trainer()
    searcher: Searcher = Searcher()
    run_policy: RunPolicy = RunPolicy()
    fork_from: ForkFrom | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        k, s = self.objective.responses_per_prompt, self.searcher.samples_per_prompt
        if k > s:
            raise ValueError(
                f"objective.responsesPerPrompt (K) must be <= searcher.samplesPerPrompt (S), got {k} > {s}: "
                f"raise samplesPerPrompt to {k} or more"
            )
        if k > self.buffer.capacity_per_prompt:
            raise ValueError(
                f"buffer.capacityPerPrompt must be >= objective.responsesPerPrompt (K), "
                f"got {self.buffer.capacity_per_prompt} < {k}: raise capacityPerPrompt"
            )
        if self.task.sampling.max_tokens >= self.model.max_model_len:
            raise ValueError(
                f"task.sampling.maxTokens must be < model.maxModelLen, got {self.task.sampling.max_tokens} >= "
                f"{self.model.max_model_len}: lower maxTokens or raise maxModelLen"
            )
        return self

    def run_config(self) -> RunConfig:
        """The frozen half."""
        return RunConfig(
            model=self.model, task=self.task, objective=self.objective, buffer=self.buffer, fork_from=self.fork_from
        )

    def live_config(self) -> LiveConfig:
        """The half that may change while the run goes on."""
        return LiveConfig(
            sync=self.sync,
            storage=self.storage,
            trainer=TrainerSettings(micro_batch_tokens=self.trainer.micro_batch_tokens),
            searcher=SearcherSettings(engine=self.searcher.engine, samples_per_prompt=self.searcher.samples_per_prompt),
            buffer=self.buffer,
            reward_timeout_seconds=self.task.reward.timeout_seconds,
            reward_memory_bytes=self.task.reward.memory_bytes,
        )


class Metadata(Contract):
    """Object metadata that the command line reads; Kubernetes has more."""

    name: str = Field(max_length=MAX_NAME_LENGTH, pattern=r"^[a-z]([a-z0-9-]*[a-z0-9])?$")
    namespace: str = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class TBAJob(Contract):
    """One run."""

    api_version: Literal["tba.dev/v1alpha1"]
    kind: Literal["TBAJob"]
    metadata: Metadata
    spec: JobSpec

    @property
    def owner(self) -> str:
        """namespace/name: who made a run, in run.json."""
        return f"{self.metadata.namespace}/{self.metadata.name}"
