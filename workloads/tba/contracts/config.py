"""Run configuration: what to train. Knows nothing of Kubernetes (interface.md §1).

`RunConfig` is frozen for the life of a run and lies in the bucket; `LiveConfig` may change while it runs.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import to_jsonable_python

from tba.contracts.base import Contract


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON carries them to a job's processes: a date that YAML knows is text there.

    Raises: ValueError for a number that JSON would make a null of.
    """
    try:
        json.dumps(values, allow_nan=False, skipkeys=True, default=str)
    except ValueError:
        raise ValueError(f"numbers must be finite, got {values!r}: write them as text, or leave them out") from None
    return to_jsonable_python(values)


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FreeForm = Annotated[dict[str, Any], AfterValidator(_finite)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[int, Field(ge=1)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
Beta = Annotated[float, Field(ge=0, lt=1)]
MAX_URI_LENGTH = 1024
PROMPT_SLOT = "(^|[^{])([{][{])*[{]prompt[}]"
"""Where a template takes the prompt. {{prompt}}, as other template languages have it, stands for its own letters."""

LIVE_BUFFER_FIELDS = ("max_trajectories", "max_replay_ratio", "max_policy_lag", "max_replay_lag")
"""Of Buffer: may change while a run goes on; everything else of it is frozen."""
LIVE_REWARD_FIELDS = ("timeout_seconds", "memory_bytes", "workers")
MAX_REWARD_WORKERS = 256
"""The same of Reward."""


class SecretRef(Contract):
    """Name of a Secret in the job's namespace; values never appear in the spec."""

    name: ObjectName
    """Of the Secret."""


class ConfigMapRef(Contract):
    """A key of a ConfigMap in the job's namespace."""

    name: ObjectName
    """Of the ConfigMap."""
    key: ObjectName
    """In its data."""


class LoRA(Contract):
    """Low-rank adapter to train in place of the full weights. Snapshots and checkpoints hold the adapter alone."""

    rank: int = Field(default=16, ge=1)
    """Of each adapter matrix."""
    alpha: PositiveFloat = 32.0
    """The adapter is scaled by alpha / rank."""
    target_modules: list[str] = Field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1)
    """Names of the linear layers that get an adapter; the output embedding can have none."""


class Model(Contract):
    """The model to post-train. Only the trainer reads `uri`; searchers take version 0 from the bucket."""

    uri: str = Field(pattern=r"^(hf|s3|file|pvc)://.+", max_length=MAX_URI_LENGTH)
    """hf://org/name, s3://bucket/prefix, file:///directory or pvc://claim/path."""
    revision: str | None = None
    """Revision of a Hugging Face repository; resolved once and recorded."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of computation and published weights. Master weights and optimizer are float32 always."""
    max_model_len: int = Field(default=1024, ge=2)
    """Prompt plus response tokens."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    secret_ref: SecretRef | None = None
    """Secret with HF_TOKEN."""
    lora: LoRA | None = None
    """Train an adapter beside frozen weights; the reference is the model without it. null: all weights are trained."""


class Prompts(Contract):
    """Where prompts come from. JSON Lines, Parquet or a Hugging Face data set."""

    uri: str | None = Field(default=None, pattern=r"^(hf|s3|file|pvc)://.+", max_length=MAX_URI_LENGTH)
    """Exactly one of uri and configMapRef. A relative file:// path is relative to the job file."""
    config_map_ref: ConfigMapRef | None = None
    """A small data set in a ConfigMap."""
    split: str = "train"
    """Split of a Hugging Face data set; ignored for files."""
    prompt_field: str = "question"
    """Column with the prompt's text, or with a list of chat messages."""
    answer_field: str | None = "answer"
    """Column handed to the reward function; null if it needs none."""
    template: str | None = None
    """Text around the prompt, with {prompt} in it (other braces doubled)."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """auto: the tokenizer's chat template if it has one and `template` is not set."""
    secret_ref: SecretRef | None = None
    """Secret with HF_TOKEN, for a gated data set."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.uri is None) == (self.config_map_ref is None):
            raise ValueError("set exactly one of uri and configMapRef")
        if self.template is not None and not re.search(PROMPT_SLOT, self.template):
            raise ValueError(f"template must contain {{prompt}} in single braces, got {self.template!r}")
        return self


class Reward(Contract):
    """How a response is scored. Exactly one of name, entrypoint, configMapRef."""

    name: str | None = None
    """A built-in: gsm8k, math, regex, arithmetic, fake."""
    entrypoint: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """pkg.mod:fn, called as fn(prompt, response, answer, **parameters) -> float."""
    config_map_ref: ConfigMapRef | None = None
    """A Python file with `def reward(prompt, response, answer, **parameters) -> float`."""
    timeout_seconds: PositiveFloat = 10.0
    """Wall-clock limit of one call; the worker is killed and the sample counted, never scored 0. Live."""
    memory_bytes: int = Field(default=2 * 1024**3, ge=64 * 1024**2)
    """Address-space limit of a reward worker. Live."""
    workers: int | None = Field(default=None, ge=1, le=MAX_REWARD_WORKERS)
    """Processes of a searcher that score, one response at a time each. null: half of its CPUs, at most 8. A reward that
    waits, such as for a remote grader, wants more. Live."""
    parameters: FreeForm = Field(default_factory=dict)
    """Keyword arguments of the reward function."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [n for n in ("name", "entrypoint", "config_map_ref") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of name, entrypoint and configMapRef, got {len(given)}")
        return self


class Sampling(Contract):
    """How searchers sample. top_p is 1 and top_k off, always: the objective needs full support."""

    temperature: PositiveFloat = 1.0
    """Of the responses; objective.temperature is another."""
    max_tokens: int = Field(default=512, ge=1)
    """Response tokens, end-of-sequence included."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a response."""


class Evaluation(Contract):
    """Held-out prompts, answered by searchers and aggregated by the trainer."""

    prompts: Prompts | None = None
    """null: no evaluation."""
    every_steps: Steps = 50
    """Steps between evaluated snapshots."""
    max_prompts: int = Field(default=1024, ge=1)
    """The first so many are used."""
    sampling: Literal["greedy", "sample"] = "greedy"
    """greedy: the likeliest token each time; sample: as task.sampling."""
    samples: int = Field(default=1, ge=1)
    """Responses a prompt; pass@1 and pass@samples are reported."""

    @model_validator(mode="after")
    def _greedy_once(self) -> Self:
        if self.sampling == "greedy" and self.samples != 1:
            raise ValueError(f"samples must be 1 with greedy sampling, got {self.samples}: set sampling: sample")
        return self


class Task(Contract):
    """Prompts, reward and sampling."""

    prompts: Prompts
    """Training prompts: JSON Lines, Parquet or a Hugging Face data set."""
    reward: Reward
    sampling: Sampling = Sampling()
    evaluation: Evaluation = Evaluation()


class Schedule(Contract):
    """Learning rate over steps."""

    warmup_steps: int = Field(default=20, ge=0)
    """Steps of the linear rise from 0."""
    decay: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """wsd: constant, then linear to 0 over the last fifth of totalSteps."""


class Optimizer(Contract):
    """AdamW on float32 master weights."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient, as AdamW does."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Literal["auto"] | PositiveFloat | None = "auto"
    """auto: 3 x the running median of the gradient norm; null: no clipping (always so under lossScale Paper)."""


class Reference(Contract):
    """The policy that holds the live one: log-probabilities are relative to it."""

    type: Literal["Fixed", "Reset", "EMA"] = "Fixed"
    """Fixed: version 0. Reset: a copy of the policy every everySteps. EMA: moving average."""
    every_steps: Steps | None = None
    """Of Reset."""
    decay: Fraction | None = None
    """Of EMA: reference <- decay * reference + (1 - decay) * policy, each step."""
    scorer: Literal["Trainer", "Searcher"] = "Trainer"
    """Who computes reference log-probabilities. Searcher is possible with Fixed only."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "Reset") != (self.every_steps is not None):
            raise ValueError("everySteps goes with type Reset: set both or neither")
        if (self.type == "EMA") != (self.decay is not None):
            raise ValueError("decay goes with type EMA: set both or neither")
        if self.scorer == "Searcher" and self.type != "Fixed":
            raise ValueError(f"scorer Searcher needs type Fixed, got {self.type}: searchers hold version 0 only")
        return self


_TRAJECTORY_BALANCE: dict[str, tuple[Callable[[float], bool], str]] = {
    "ratioAlpha": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "ratioClip": (lambda x: x > 0, "> 0"),
    "baselineShift": (lambda x: x >= 0, ">= 0"),
}


class Objective(Contract):
    """What the trainer minimises and for how long."""

    type: Literal["TrajectoryBalance"] = "TrajectoryBalance"
    """VarGrad trajectory balance: log Z is estimated from each group."""
    temperature: PositiveFloat = 1.0
    """T of policy and reference log-probabilities: log_softmax(logits / T)."""
    beta: PositiveFloat = 0.05
    """Weight of the pull towards the reference, in reward per nat."""
    beta_final: PositiveFloat | None = None
    """beta after betaAnnealSteps; null: beta stays."""
    beta_anneal_steps: Steps | None = None
    """Steps of the linear way from beta to betaFinal."""
    responses_per_prompt: int = Field(default=20, ge=2)
    """K: responses a group."""
    prompts_per_batch: int = Field(default=7, ge=1)
    """P: groups a batch."""
    total_steps: Steps = 700
    """The run is complete after so many optimizer steps."""
    learning_rate: PositiveFloat | None = None
    """null: by size, 1e-5 below 1B parameters, 3e-6 up to 8B, 1e-6 above; 5e-5 for LoRA. A starting guess."""
    schedule: Schedule = Schedule()
    optimizer: Optimizer = Optimizer()
    loss_scale: Literal["Reward", "Paper"] = "Reward"
    """Paper: times 2/beta, the literal Eq. 5 of arXiv 2503.18929."""
    reference: Reference = Reference()
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of every random choice of the run."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Of the objective type. TrajectoryBalance, against stale data: ratioAlpha (0..1, default 0: power of policy over
    sampler as a weight), ratioClip (> 0, default 1: its bound), baselineShift (reward, >= 0, default 0)."""

    @model_validator(mode="after")
    def _anneal(self) -> Self:
        if (self.beta_final is None) != (self.beta_anneal_steps is None):
            raise ValueError("betaFinal and betaAnnealSteps go together: set both or neither")
        unknown = self.parameters.keys() - _TRAJECTORY_BALANCE.keys()
        if unknown:
            raise ValueError(
                f"parameters of TrajectoryBalance are {', '.join(_TRAJECTORY_BALANCE)}, got {sorted(unknown)}"
            )
        for name, got in self.parameters.items():
            accepts, wanted = _TRAJECTORY_BALANCE[name]
            if isinstance(got, bool) or not isinstance(got, int | float) or not math.isfinite(got) or not accepts(got):
                raise ValueError(f"parameters.{name} must be {wanted}, got {got!r}")
        return self


class Buffer(Contract):
    """Replay buffer and how batches are drawn from it."""

    capacity_per_prompt: int = Field(default=100, ge=2)
    """Distinct responses kept a prompt; the oldest go first."""
    deduplicate: bool = True
    """Keep equal responses to a prompt once, with their multiplicity; the newest record wins."""
    max_trajectories: int | None = Field(default=None, ge=2)
    """Distinct responses kept in all; the oldest go first. Live."""
    min_initial_trajectories: int = Field(default=500, ge=0)
    """Learning starts when so many rows have been ingested, before de-duplication."""
    on_policy_probability: Fraction = 0.95
    """m: chance, for each prompt slot, of the most-on-policy branch."""
    sampling: Literal["Reward", "Uniform", "Recency"] = "Reward"
    """Replay branch: softmax of reward x inverseTemperature, uniform, or softmax of -age in steps x the same."""
    inverse_temperature: NonNegativeFloat = 1.0
    """0: the replay branch is uniform."""
    max_replay_ratio: PositiveFloat | None = 2.0
    """Rows trained / rows ingested over the last 100 steps; the trainer waits above it. null: no limit. Live."""
    max_policy_lag: int | None = Field(default=None, ge=0)
    """Strict bound on staleness, in steps, of most-on-policy draws. Live."""
    max_replay_lag: int | None = Field(default=None, ge=0)
    """Strict bound on staleness, in steps, of replay draws. Live."""


class Delta(Contract):
    """Sparse snapshots between full ones."""

    enabled: bool = True
    """false: every snapshot is full."""
    max_ratio: float = Field(default=0.5, gt=0, le=1)
    """A delta larger than this share of the full snapshot is published in full."""
    anchor_every: int = Field(default=20, ge=1)
    """A full snapshot every so many publishes."""


class Sync(Contract):
    """How weights travel to searchers. All live."""

    interval_steps: Steps = 2
    """k: optimizer steps between published snapshots."""
    ingest: Literal["Continuous", "AtSync"] = "Continuous"
    """Continuous: shards become trainable as they arrive; AtSync: at publishes only (the paper)."""
    swap: Literal["InFlight", "BetweenBatches"] = "InFlight"
    """InFlight: new weights take over amid a response, and each token records its policy."""
    delta: Delta = Delta()
    retain_versions: int = Field(default=3, ge=1)
    """Newest snapshots that are never swept."""
    poll_interval_seconds: PositiveFloat = 2.0
    """Between polls of `latest` by a searcher and of shards by the trainer."""
    stall_timeout_seconds: PositiveFloat = 1800.0
    """Without fresh data for so long the trainer reports SyncStalled."""


class Checkpoints(Contract):
    """Cadence and retention of checkpoints. All live."""

    every_steps: Steps = 50
    """Steps between checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """Keep the newest so many."""
    keep_every: Steps | None = None
    """Keep each checkpoint whose step is a multiple of this."""
    keep_best: int = Field(default=0, ge=0)
    """Keep so many with the best evaluation."""


class WorkloadIdentity(Contract):
    """A ServiceAccount that the cloud maps to storage rights."""

    service_account_name: ObjectName
    """Of the role's pods; made by you, in the job's namespace."""


class RoleCredentials(Contract):
    """Exactly one way for one role."""

    secret_ref: SecretRef | None = None
    """Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if need be, AWS_SESSION_TOKEN. Rotation is live."""
    workload_identity: WorkloadIdentity | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.secret_ref is None) == (self.workload_identity is None):
            raise ValueError("set exactly one of secretRef and workloadIdentity")
        return self


class Credentials(Contract):
    """By reference only. secretRef or workloadIdentity at the top serves both roles."""

    secret_ref: SecretRef | None = None
    """Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if need be, AWS_SESSION_TOKEN. Rotation is live."""
    workload_identity: WorkloadIdentity | None = None
    trainer: RoleCredentials | None = None
    """Of the trainer alone; then `searcher` too."""
    searcher: RoleCredentials | None = None
    """Of the searchers alone; then `trainer` too."""

    @model_validator(mode="after")
    def _shape(self) -> Self:
        top = (self.secret_ref is not None) + (self.workload_identity is not None)
        roles = (self.trainer is not None) + (self.searcher is not None)
        if (top, roles) not in ((1, 0), (0, 2)):
            raise ValueError("set one of secretRef and workloadIdentity, or both of trainer and searcher")
        return self


class Storage(Contract):
    """The bucket prefix that holds the run. uri is immutable; endpoint, region, CA and credentials are live."""

    uri: str = Field(pattern=r"^(s3|file)://.+", max_length=MAX_URI_LENGTH)
    """s3://bucket/prefix or file:///directory."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://.+", max_length=MAX_URI_LENGTH)
    """Of an S3-compatible server that is not AWS."""
    region: str | None = None
    """Of the bucket."""
    force_path_style: bool | None = None
    """null: path style if `endpoint` is set."""
    ca_bundle_config_map_ref: ConfigMapRef | None = None
    """PEM certificates that sign the endpoint's own."""
    credentials: Credentials | None = None
    """null: the default chain of the environment."""
    unsafe_single_trainer: bool = False
    """Accept a store without conditional writes: two trainers may then overwrite each other."""
    adopt: bool = False
    """Take over a prefix that another job made."""
    trajectory_retention: Literal["Keep", "UntilCheckpointed"] = "Keep"
    """UntilCheckpointed: shards are swept once a checkpoint covers them."""
    grace_seconds: NonNegativeFloat = 3600.0
    """Nothing is swept until superseded for so long, by the server's clock."""
    checkpoints: Checkpoints = Checkpoints()


class Engine(Contract):
    """What generates."""

    type: Literal["vllm", "transformers", "fake"] = "vllm"
    """transformers: works without a GPU; fake: answers without a model, for trying things out."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of one searcher (vllm)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that the engine takes (vllm)."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences in flight; null: the engine's own choice."""
    extra_args: FreeForm = Field(default_factory=dict)
    """Further arguments of the engine, as it names them."""


class SearcherSettings(Contract):
    """How a searcher process works."""

    engine: Engine = Engine()
    samples_per_prompt: int = Field(default=24, ge=2)
    """S: responses a visit, at least K."""


class ColocatedSearcher(Contract):
    """An engine inside the trainer's pod that generates while the trainer is starved, and at no other time."""

    enabled: Literal["auto"] | bool = "auto"
    """auto: the controller's choice, which in this release is false."""
    memory_fraction: float = Field(default=0.4, gt=0, lt=1)
    """Share of a GPU's memory for the engine, in place of searcher.engine.gpuMemoryUtilization."""
    free_memory: bool = False
    """Empty that memory while the trainer trains, where both do not fit: each turn then begins with moving the weights
    back and computing the cache of responses in flight again."""


class TrainerSettings(Contract):
    """How the trainer process works."""

    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Token budget of one forward pass: each prompt once and all its responses, no padding. Groups stay whole."""
    activation_checkpointing: Literal["Auto", "Always", "Selective", "Never"] = "Auto"
    """Compute layers again in the backward pass. Always: whole, a third more work, a fraction of the memory. Selective:
    what is cheap, such as the product in a gated network, some percent more work, about two thirds of the memory.
    Auto: on a GPU the least with which the activations of microBatchTokens fit into what is free, as measured; on a
    CPU never."""
    compile: bool = False
    """Compile decoder layers and log-probabilities on a GPU: some minutes at start, faster steps. Read at start."""
    offload_reference: bool = False
    """Keep the reference in host memory while it does not score: room on a GPU for a copy of the weights each time."""
    colocated_searcher: ColocatedSearcher = ColocatedSearcher()

    @model_validator(mode="after")
    def _compiled_layers_choose(self) -> Self:
        # By themselves, what is cheap enough to compute again.
        if self.compile and self.activation_checkpointing == "Selective":
            raise ValueError(
                "activationCheckpointing: Selective goes without trainer.compile, got true: "
                "set activationCheckpointing: Auto, or compile: false"
            )
        return self


class ForkFrom(Contract):
    """Start from another run's checkpoint."""

    uri: str = Field(pattern=r"^(s3|file)://.+", max_length=MAX_URI_LENGTH)
    """Bucket prefix of the other run."""
    step: int = Field(ge=0)
    """Of its checkpoint."""


class RunConfig(Contract):
    """What to train. `identity()` of it may never change during a run."""

    model: Model
    task: Task
    objective: Objective = Objective()
    buffer: Buffer = Buffer()
    fork_from: ForkFrom | None = None

    def identity(self) -> dict[str, Any]:
        """The part that may never change: everything but live fields. Compare two of these on resume."""
        data = self.model_dump(mode="json")
        for section, live in ((data["buffer"], LIVE_BUFFER_FIELDS), (data["task"]["reward"], LIVE_REWARD_FIELDS)):
            for field in live:
                section.pop(to_camel(field))
        return data


class LiveConfig(Contract):
    """What may change while the run goes on; re-read by the processes when the file changes."""

    sync: Sync = Sync()
    storage: Storage
    trainer: TrainerSettings = TrainerSettings()
    searcher: SearcherSettings = SearcherSettings()
    buffer: Buffer = Buffer()
    """Only its live fields are taken: maxTrajectories, maxReplayRatio, maxPolicyLag, maxReplayLag."""
    reward_timeout_seconds: PositiveFloat = 10.0
    reward_memory_bytes: int = Field(default=2 * 1024**3, ge=64 * 1024**2)
    reward_workers: int | None = Field(default=None, ge=1, le=MAX_REWARD_WORKERS)
