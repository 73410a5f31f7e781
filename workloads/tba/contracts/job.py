"""The TBAJob resource: run configuration plus placement (interface.md §1). Placement knows nothing of torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tba.contracts.base import Contract
from tba.contracts.config import (
    Buffer,
    ForkFrom,
    LiveConfig,
    Model,
    Objective,
    PositiveFloat,
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
STARTUP_DEADLINE_SECONDS = 3600

# As Kubernetes writes quantities: 500m, 0.5, 2, 16Gi, 1e3.
Quantity = (
    Annotated[int, Field(ge=0)]
    | Annotated[float, Field(ge=0)]
    | Annotated[str, Field(pattern=r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?$")]
)
ExitCode = Annotated[int, Field(ge=1, le=255)]


class PodTemplate(Contract):
    """Strategic additions to a role's pod."""

    metadata: dict[Literal["labels", "annotations"], dict[str, str]] = Field(default_factory=dict)
    """Labels and annotations of the pod."""
    spec: dict[str, Any] = Field(default_factory=dict)
    """Any field of a pod's spec: nodeSelector, tolerations, volumes, ... Containers are merged by name."""


class Container(Contract):
    """Container fields of either role."""

    image: str | None = None
    """null: the operator's default."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """null: as Kubernetes decides."""
    image_pull_secrets: list[dict[str, str]] = Field(default_factory=list)
    """Secrets that open the image's registry, each {name: ...}."""
    command: list[str] = Field(default_factory=list)
    """In place of the image's entry point."""
    args: list[str] = Field(default_factory=list)
    """In place of the role's name."""
    env: list[dict[str, Any]] = Field(default_factory=list)
    """Environment variables, as in a pod: {name, value} or {name, valueFrom}."""
    env_from: list[dict[str, Any]] = Field(default_factory=list)
    """Sources of environment variables, as in a pod."""
    resources: dict[Literal["limits", "requests"], dict[str, Quantity]] = Field(default_factory=dict)
    """As in a pod. Without a GPU here the role asks for what its engine needs."""
    pod_template: PodTemplate = PodTemplate()


class Trainer(Container, TrainerSettings):
    """The trainer pod. Immutable unless the job is suspended."""

    gpus_per_node: int | None = Field(default=None, ge=0)
    """Processes of a pod that train together, each on a GPU of its own, with the weights spread over all. null: 1, or 0
    with a CPU engine."""
    nodes: int = Field(default=1, ge=1)
    """Trainer pods that train together; the first is the trainer, the others lend it their GPUs."""
    termination_grace_period_seconds: int = Field(default=600, ge=0)
    """Time to write a checkpoint and stop."""

    @model_validator(mode="after")
    def _shares_one_gpu(self) -> Self:
        if self.colocated_searcher.enabled is True and self.num_ranks > 1:
            field, got = self.several
            raise ValueError(
                f"colocatedSearcher shares one GPU with the trainer, got {field} {got}: "
                f"set {field}: 1, or add searcher.replicas instead"
            )
        return self

    @model_validator(mode="after")
    def _several_ranks(self) -> Self:
        if self.num_ranks > 1 and (self.compile or self.offload_reference):
            field, got = self.several
            raise ValueError(
                f"{field} > 1 goes with neither compile nor offloadReference, got {got}: "
                f"set both to false, or {field}: 1"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Processes that train together, on all nodes."""
        return max(1, self.gpus_per_node or 0) * self.nodes

    @property
    def several(self) -> tuple[str, int]:
        """The field, and its value, that makes more than one process train."""
        gpus = self.gpus_per_node or 0
        return ("gpusPerNode", gpus) if gpus > 1 else ("nodes", self.nodes)


class Autoscaling(Contract):
    """Who decides the number of searchers."""

    mode: Literal["Static", "External", "Managed"] = "Static"
    """Static: as written. External: HPA, KEDA or kubectl write /scale. Managed: the controller decides."""
    min_replicas: int = Field(default=1, ge=1)
    """Of Managed."""
    max_replicas: int | None = Field(default=None, ge=1, le=4096)
    """Of Managed, which needs it."""
    target_replay_ratio: PositiveFloat = 1.0
    """Rows trained / rows generated that Managed aims at."""
    stabilization_seconds: int = Field(default=300, ge=0)
    """Managed acts on what held for so long."""

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
    """Searcher pods; /scale writes it."""
    min_available: int = Field(default=1, ge=0)
    """Ready searchers that make the condition SearchersReady true."""
    autoscaling: Autoscaling = Autoscaling()
    pod_disruption_budget: bool = True
    """Keep minAvailable searchers through node drains."""
    termination_grace_period_seconds: int = Field(default=60, ge=0)
    """Time to upload what is generated and stop."""


class FailureRule(Contract):
    """What to do when a trainer container ends with one of these exit codes."""

    action: Literal["FailJob", "Ignore", "Count"]
    """FailJob: end the job. Ignore: try again, uncounted. Count: try again, against backoffLimit."""
    on_exit_codes: list[ExitCode] = Field(min_length=1, max_length=255)
    """Of the trainer container."""


class RunPolicy(Contract):
    """Life cycle of the job."""

    backoff_limit: int = Field(default=6, ge=0)
    """Attempts that made no new checkpoint before the job fails."""
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    """The job fails if it is not complete by then; suspended time does not count."""
    startup_deadline_seconds: int = Field(default=STARTUP_DEADLINE_SECONDS, ge=1)
    """The job fails if the trainer was never ready by then."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    """The job is deleted so long after its end; null: never. The bucket is left alone."""
    cleanup_policy: Literal["None", "Running", "All"] = "Running"
    """What is removed at the end: nothing, pods that still run, or every pod."""
    priority_class_name: str | None = None
    """Of the pods."""
    failure_rules: list[FailureRule] = Field(default_factory=list, max_length=10)
    """Tried in order, before the controller's own."""

    @model_validator(mode="after")
    def _deadlines(self) -> Self:
        startup, active = self.startup_deadline_seconds, self.active_deadline_seconds
        if active is not None and startup > active and startup != STARTUP_DEADLINE_SECONDS:  # the default may be later
            raise ValueError(
                f"startupDeadlineSeconds must be <= activeDeadlineSeconds, got {startup} > {active}: lower it"
            )
        return self


class JobSpec(Contract):
    """Everything a user says about a run."""

    suspend: bool = False
    """true: checkpoint, then stop every pod; false again: go on from there."""
    managed_by: Literal["tba.dev/tbajob-controller", "kueue.x-k8s.io/multikueue"] = "tba.dev/tbajob-controller"
    """tba.dev/tbajob-controller, or kueue.x-k8s.io/multikueue, whose jobs the controller leaves alone."""
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

    @model_validator(mode="after")
    def _plain_lora(self) -> Self:
        if self.model.lora is None:
            return self
        if self.objective.reference.type != "Fixed":
            raise ValueError(
                f"model.lora needs objective.reference.type Fixed, got {self.objective.reference.type}: the reference "
                "is the model without its adapter; set type: Fixed, or remove model.lora"
            )
        if self.trainer.compile:
            raise ValueError(
                "model.lora goes without trainer.compile, got true: set trainer.compile: false, or remove model.lora"
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
            trainer=TrainerSettings(**{name: getattr(self.trainer, name) for name in TrainerSettings.model_fields}),
            searcher=SearcherSettings(engine=self.searcher.engine, samples_per_prompt=self.searcher.samples_per_prompt),
            buffer=self.buffer,
            reward_timeout_seconds=self.task.reward.timeout_seconds,
            reward_memory_bytes=self.task.reward.memory_bytes,
            reward_workers=self.task.reward.workers,
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
