"""What the API server refuses beyond types and bounds: one table of CEL rules, each at the model it judges.

A rule sees `self`, and `oldSelf` if it is about a change; defaults are filled in by then (crd.py spells each out in
full). Those that mirror a pydantic validator stand in the order of tba.contracts, then what this release cannot do,
then what may not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from tba.contracts.config import (
    LIVE_BUFFER_FIELDS,
    LIVE_REWARD_FIELDS,
    PROMPT_SLOT,
    Buffer,
    Credentials,
    Evaluation,
    Model,
    Objective,
    Prompts,
    Reference,
    Reward,
    RoleCredentials,
    Storage,
    Task,
)
from tba.contracts.job import (
    MAX_NAME_LENGTH,
    STARTUP_DEADLINE_SECONDS,
    Autoscaling,
    JobSpec,
    RunPolicy,
    TBAJob,
    Trainer,
)

_NEW_RUN = "leave it, or start a new job with a storage.uri of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One condition. `got` is a format (%d, %s) of the CEL expressions `of`; `what` and `remedy` have no ' and no %."""

    id: str
    model: type[BaseModel]
    holds: str
    what: str
    remedy: str
    got: str = ""
    of: tuple[str, ...] = ()
    field: str | None = None
    """Named in the error in place of the whole object."""

    @property
    def message(self) -> str:
        """For a rule whose `got` is an expression the API server falls back to it."""
        got = f", got {self.got}" if self.got and not self.of else ""
        return f"{self.what}{got}: {self.remedy}"

    @property
    def message_expression(self) -> str | None:
        """The same with what it got. With `format`, for the cost of `string(number)` counts as unbounded."""
        return f"'{self.what}, got {self.got}: {self.remedy}'.format([{', '.join(self.of)}])" if self.of else None

    @property
    def forbids_change(self) -> bool:
        """Whether it compares with the stored object; such a rule is not tried on creation."""
        return "oldSelf" in self.holds


def unchanged(model: type[BaseModel], *, besides: Sequence[str] = ()) -> str:
    """CEL: every field of `model` but those `besides` (snake_case) is as before, set or not."""
    terms = []
    for name, info in model.model_fields.items():
        if name in besides:
            continue
        field = info.alias
        same = f"self.{field} == oldSelf.{field}"
        always_there = info.is_required() or info.get_default(call_default_factory=True, validated_data={}) is not None
        terms.append(same if always_there else f"({_both_or_neither(field)} && (!has(self.{field}) || {same}))")
    return " && ".join(terms)


def _both_or_neither(field: str | None) -> str:
    return f"has(self.{field}) == has(oldSelf.{field})"


def _count(*fields: str) -> str:
    return " + ".join(f"(has(self.{field}) ? 1 : 0)" for field in fields)


def _either(first: str, second: str) -> str:
    """CEL: which of two optional fields are there, in words."""
    return f"(has(self.{first}) ? (has(self.{second}) ? 'both' : '{first} alone') : " + (
        f"(has(self.{second}) ? '{second} alone' : 'neither'))"
    )


_K, _S = "self.objective.responsesPerPrompt", "self.searcher.samplesPerPrompt"
_CAPACITY = "self.buffer.capacityPerPrompt"
_TOKENS, _CONTEXT = "self.task.sampling.maxTokens", "self.model.maxModelLen"
_STARTUP, _ACTIVE = "self.startupDeadlineSeconds", "self.activeDeadlineSeconds"

_SHAPE = (
    Rule(
        id="name-length",
        model=TBAJob,
        holds=f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        what=f"metadata.name must have at most {MAX_NAME_LENGTH} characters",
        got="%d",
        of=("size(self.metadata.name)",),
        remedy="shorten it, for names of pods and services are made from it",
    ),
    Rule(
        id="name-format",
        model=TBAJob,
        holds="self.metadata.name.matches('^[a-z]([a-z0-9-]*[a-z0-9])?$')",
        what="metadata.name must be lower-case letters, digits and dashes and start with a letter",
        got="%s",
        of=("self.metadata.name",),
        remedy="rename it, for services are named after it",
    ),
    Rule(
        id="prompts-one-source",
        model=Prompts,
        holds="has(self.uri) != has(self.configMapRef)",
        what="set exactly one of uri and configMapRef",
        got="%s",
        of=(_either("uri", "configMapRef"),),
        remedy="say in one place where the prompts are",
    ),
    Rule(
        id="prompts-template",
        model=Prompts,
        field="template",
        holds=f"!has(self.template) || self.template.matches('{PROMPT_SLOT}')",
        what="template must contain {prompt} in single braces",
        got="%s",
        of=("self.template",),
        remedy="put {prompt} where the text of the prompt goes",
    ),
    Rule(
        id="reward-one-kind",
        model=Reward,
        holds=f"{_count('name', 'entrypoint', 'configMapRef')} == 1",
        what="set exactly one of name, entrypoint and configMapRef",
        got="%d",
        of=(_count("name", "entrypoint", "configMapRef"),),
        remedy="name: gsm8k takes a built-in, the others your own code",
    ),
    Rule(
        id="evaluation-greedy-once",
        model=Evaluation,
        field="samples",
        holds="self.sampling != 'greedy' || self.samples == 1",
        what="samples must be 1 with greedy sampling",
        got="%d",
        of=("self.samples",),
        remedy="set sampling: sample, or samples: 1",
    ),
    Rule(
        id="reference-reset",
        model=Reference,
        holds="(self.type == 'Reset') == has(self.everySteps)",
        what="everySteps goes with type Reset",
        got="%s %s everySteps",
        of=("self.type", "has(self.everySteps) ? 'with' : 'without'"),
        remedy="set both or neither",
    ),
    Rule(
        id="reference-ema",
        model=Reference,
        holds="(self.type == 'EMA') == has(self.decay)",
        what="decay goes with type EMA",
        got="%s %s decay",
        of=("self.type", "has(self.decay) ? 'with' : 'without'"),
        remedy="set both or neither",
    ),
    Rule(
        id="reference-scorer",
        model=Reference,
        field="scorer",
        holds="self.scorer != 'Searcher' || self.type == 'Fixed'",
        what="scorer Searcher needs type Fixed, for searchers hold version 0 only",
        got="%s",
        of=("self.type",),
        remedy="set scorer: Trainer",
    ),
    Rule(
        id="objective-anneal",
        model=Objective,
        holds="has(self.betaFinal) == has(self.betaAnnealSteps)",
        what="betaFinal and betaAnnealSteps go together",
        got="%s",
        of=(_either("betaFinal", "betaAnnealSteps"),),
        remedy="set both or neither",
    ),
    Rule(
        id="role-credentials-one",
        model=RoleCredentials,
        holds="has(self.secretRef) != has(self.workloadIdentity)",
        what="set exactly one of secretRef and workloadIdentity",
        got="%s",
        of=(_either("secretRef", "workloadIdentity"),),
        remedy="keep the one that opens the bucket",
    ),
    Rule(
        id="credentials-shape",
        model=Credentials,
        holds="has(self.secretRef) != has(self.workloadIdentity) ? !has(self.trainer) && !has(self.searcher)"
        " : !has(self.secretRef) && has(self.trainer) && has(self.searcher)",
        what="set one of secretRef and workloadIdentity, or both of trainer and searcher",
        got="%d of these four",
        of=(_count("secretRef", "workloadIdentity", "trainer", "searcher"),),
        remedy="one at the top serves both roles",
    ),
    Rule(
        id="autoscaling-needs-maximum",
        model=Autoscaling,
        holds="self.mode != 'Managed' || has(self.maxReplicas)",
        what="maxReplicas is required with mode Managed",
        got="none",
        remedy="set the most searchers you can pay for",
    ),
    Rule(
        id="autoscaling-bounds",
        model=Autoscaling,
        field="maxReplicas",
        holds="!has(self.maxReplicas) || self.maxReplicas >= self.minReplicas",
        what="maxReplicas must be >= minReplicas",
        got="%d < %d",
        of=("self.maxReplicas", "self.minReplicas"),
        remedy="raise maxReplicas or lower minReplicas",
    ),
    Rule(
        id="deadlines-order",
        model=RunPolicy,
        field="startupDeadlineSeconds",
        # The default may be later than a short activeDeadlineSeconds: nobody asked for it.
        holds=f"!has({_ACTIVE}) || {_STARTUP} <= {_ACTIVE} || {_STARTUP} == {STARTUP_DEADLINE_SECONDS}",
        what="startupDeadlineSeconds must be <= activeDeadlineSeconds",
        got="%d > %d",
        of=(_STARTUP, _ACTIVE),
        remedy="lower it, or leave it out",
    ),
    Rule(
        id="group-fits-visit",
        model=JobSpec,
        field="searcher.samplesPerPrompt",
        holds=f"{_K} <= {_S}",
        what="objective.responsesPerPrompt (K) must be <= searcher.samplesPerPrompt (S)",
        got="%d > %d",
        of=(_K, _S),
        remedy="raise searcher.samplesPerPrompt to K or more, or lower K",
    ),
    Rule(
        id="group-fits-buffer",
        model=JobSpec,
        field="buffer.capacityPerPrompt",
        holds=f"{_K} <= {_CAPACITY}",
        what="buffer.capacityPerPrompt must be >= objective.responsesPerPrompt (K)",
        got="%d < %d",
        of=(_CAPACITY, _K),
        remedy="raise buffer.capacityPerPrompt to K or more",
    ),
    Rule(
        id="response-fits-context",
        model=JobSpec,
        field="task.sampling.maxTokens",
        holds=f"{_TOKENS} < {_CONTEXT}",
        what="task.sampling.maxTokens must be < model.maxModelLen, which holds the prompt too",
        got="%d >= %d",
        of=(_TOKENS, _CONTEXT),
        remedy="lower maxTokens or raise maxModelLen",
    ),
)

# tba.contracts.supported and the validators of placement say the same on the command line.
_RELEASE = (
    Rule(
        id="release-scores-at-the-trainer",
        model=Reference,
        field="scorer",
        holds="self.scorer == 'Trainer'",
        what="this release scores the reference at the trainer",
        got="%s",
        of=("self.scorer",),
        remedy="set scorer: Trainer",
    ),
    Rule(
        id="release-plain-nodes",
        model=Trainer,
        field="nodes",
        holds="self.nodes <= 1 || !(self.compile || self.offloadReference)",
        what="nodes > 1 goes with neither compile nor offloadReference",
        got="%d",
        of=("self.nodes",),
        remedy="set both to false, or nodes: 1",
    ),
    Rule(
        id="lora-fixed-reference",
        model=JobSpec,
        field="objective.reference.type",
        holds="!has(self.model.lora) || self.objective.reference.type == 'Fixed'",
        what="model.lora needs objective.reference.type Fixed: the reference is the model without its adapter",
        got="%s",
        of=("self.objective.reference.type",),
        remedy="set type: Fixed, or remove model.lora",
    ),
    Rule(
        id="release-lora-no-compile",
        model=JobSpec,
        field="trainer.compile",
        holds="!has(self.model.lora) || !self.trainer.compile",
        what="model.lora goes without trainer.compile in this release",
        got="true",
        remedy="set trainer.compile: false, or remove model.lora",
    ),
    Rule(
        id="compiled-layers-choose",
        model=Trainer,
        field="activationCheckpointing",
        holds="!(self.compile && self.activationCheckpointing == 'Selective')",
        what="activationCheckpointing: Selective goes without trainer.compile",
        got="true",
        remedy="set activationCheckpointing: Auto, or compile: false",
    ),
    Rule(
        id="release-plain-ranks",
        model=Trainer,
        field="gpusPerNode",
        holds="!has(self.gpusPerNode) || self.gpusPerNode <= 1 || !(self.compile || self.offloadReference)",
        what="gpusPerNode > 1 goes with neither compile nor offloadReference",
        got="%d",
        of=("self.gpusPerNode",),
        remedy="set both to false, or gpusPerNode: 1",
    ),
)

_FROZEN = (
    Rule(
        id="frozen-managed-by",
        model=JobSpec,
        field="managedBy",
        holds="self.managedBy == oldSelf.managedBy",
        what="managedBy cannot change",
        got="%s -> %s",
        of=("oldSelf.managedBy", "self.managedBy"),
        remedy="delete the job and create it anew, its storage.uri goes on from the newest checkpoint",
    ),
    Rule(
        id="frozen-model",
        model=Model,
        holds="self == oldSelf",
        what="model is fixed for the life of a run",
        remedy=_NEW_RUN,
    ),
    Rule(
        id="frozen-task",
        model=Task,
        holds=unchanged(Task, besides=("reward",)),  # whose frozen fields have a rule of their own
        what="prompts, sampling and evaluation are fixed for the life of a run",
        remedy=_NEW_RUN,
    ),
    Rule(
        id="frozen-reward",
        model=Reward,
        holds=unchanged(Reward, besides=LIVE_REWARD_FIELDS),
        what="of reward only timeoutSeconds, memoryBytes and workers may change during a run",
        remedy=_NEW_RUN,
    ),
    Rule(
        id="frozen-objective",
        model=Objective,
        holds="self == oldSelf",
        what="objective is fixed for the life of a run",
        remedy=_NEW_RUN,
    ),
    Rule(
        id="frozen-buffer",
        model=Buffer,
        holds=unchanged(Buffer, besides=LIVE_BUFFER_FIELDS),
        what="of buffer only maxTrajectories, maxReplayRatio, maxPolicyLag and maxReplayLag may change during a run",
        remedy=_NEW_RUN,
    ),
    Rule(
        id="frozen-storage-uri",
        model=Storage,
        field="uri",
        holds="self.uri == oldSelf.uri",
        what="storage.uri is where the run lives and cannot change",
        got="%s -> %s",
        of=("oldSelf.uri", "self.uri"),
        remedy="start a new job for a new place",
    ),
    Rule(
        id="frozen-fork",
        model=JobSpec,
        holds=f"{_both_or_neither('forkFrom')} && (!has(self.forkFrom) || self.forkFrom == oldSelf.forkFrom)",
        what="forkFrom is fixed for the life of a run",
        remedy=_NEW_RUN,
    ),
    Rule(
        id="trainer-while-suspended",
        model=JobSpec,
        field="trainer",
        holds="oldSelf.suspend || self.trainer == oldSelf.trainer",
        what="trainer can change only while the job is suspended",
        remedy="set suspend: true first, then change trainer and set suspend: false",
    ),
)

RULES = (*_SHAPE, *_RELEASE, *_FROZEN)
