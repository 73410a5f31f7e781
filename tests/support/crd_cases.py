"""For every CEL rule of the CRD jobs that it accepts and jobs that it refuses, tried with and without an API server."""

import copy
from dataclasses import dataclass, field

from support.jobs import SMALLEST


@dataclass(frozen=True)
class Case:
    """Changes to the smallest job, as JSON merge patches: null removes. `stored` makes it an update of that job."""

    rule: str
    accepted: tuple[dict, ...]
    refused: tuple[dict, ...]
    told: str
    """What the message says about the first refused one."""
    stored: dict | None = field(default=None)


def named(name):
    return {"metadata": {"name": name}}


def spec(**sections):
    return {"spec": sections}


def task(**sections):
    return spec(task=sections)


def objective(**fields):
    return spec(objective=fields)


def credentials(**fields):
    return spec(storage={"credentials": fields})


SECRET, IDENTITY = {"secretRef": {"name": "s3"}}, {"workloadIdentity": {"serviceAccountName": "s3"}}
CONFIG_MAP = {"configMapRef": {"name": "a", "key": "b"}}

SHAPE = (
    Case(
        rule="name-length",
        accepted=(named("a" * 40),),
        refused=(named("a" * 41), named("a" * 250)),
        told="metadata.name must have at most 40 characters, got 41: shorten it",
    ),
    Case(
        rule="name-format",
        accepted=(named("a"), named("a-1")),
        refused=(named("a.b"), named("1a")),
        told="start with a letter, got a.b: rename it",
    ),
    Case(
        rule="prompts-one-source",
        accepted=(
            task(prompts={"uri": None, **CONFIG_MAP}),
            task(evaluation={"prompts": {"uri": "hf://a/b"}}),
        ),
        refused=(
            task(prompts={"uri": None}),
            task(prompts=CONFIG_MAP),
            task(evaluation={"prompts": {"split": "test"}}),
        ),
        told="set exactly one of uri and configMapRef, got neither",
    ),
    Case(
        rule="prompts-template",
        accepted=(
            task(prompts={"template": "Q: {prompt} A:"}),
            task(prompts={"template": "{{{prompt}}}"}),
            task(prompts={"template": "{{x}}\n{prompt}"}),
        ),
        refused=(
            task(prompts={"template": "Q: {question}"}),
            task(prompts={"template": ""}),
            task(prompts={"template": "{{prompt}}"}),
            task(prompts={"template": "Q: {{prompt}} A:"}),
            task(prompts={"template": "{{{{prompt}}}}"}),
        ),
        told="template must contain {prompt} in single braces, got",
    ),
    Case(
        rule="reward-one-kind",
        accepted=(
            task(reward={"name": None, "entrypoint": "pkg.mod:fn"}),
            task(reward={"name": None, **CONFIG_MAP}),
        ),
        refused=(
            task(reward={"name": None}),
            task(reward={"entrypoint": "a:b"}),
            task(reward={"entrypoint": "a:b", **CONFIG_MAP}),
        ),
        told="set exactly one of name, entrypoint and configMapRef, got 0: name: gsm8k takes a built-in",
    ),
    Case(
        rule="evaluation-greedy-once",
        accepted=(task(evaluation={"sampling": "sample", "samples": 4}), task(evaluation={"samples": 1})),
        refused=(task(evaluation={"samples": 4}),),
        told="samples must be 1 with greedy sampling, got 4: set sampling: sample",
    ),
    Case(
        rule="reference-reset",
        accepted=(objective(reference={"type": "Reset", "everySteps": 10}),),
        refused=(objective(reference={"type": "Reset"}), objective(reference={"everySteps": 10})),
        told="everySteps goes with type Reset, got Reset without everySteps",
    ),
    Case(
        rule="reference-ema",
        accepted=(objective(reference={"type": "EMA", "decay": 0.99}),),
        refused=(objective(reference={"type": "EMA"}), objective(reference={"decay": 1})),
        told="decay goes with type EMA, got EMA without decay",
    ),
    Case(
        rule="reference-scorer",
        accepted=(objective(reference={"type": "EMA", "decay": 0.99, "scorer": "Trainer"}),),
        refused=(objective(reference={"type": "EMA", "decay": 0.99, "scorer": "Searcher"}),),
        told="scorer Searcher needs type Fixed, for searchers hold version 0 only, got EMA",
    ),
    Case(
        rule="objective-anneal",
        accepted=(objective(betaFinal=0.01, betaAnnealSteps=100),),
        refused=(objective(betaFinal=0.01), objective(betaAnnealSteps=100)),
        told="betaFinal and betaAnnealSteps go together, got betaFinal alone",
    ),
    Case(
        rule="role-credentials-one",
        accepted=(credentials(trainer=SECRET, searcher=IDENTITY),),
        refused=(
            credentials(trainer={}, searcher=SECRET),
            credentials(trainer=SECRET, searcher=SECRET | IDENTITY),
        ),
        told="set exactly one of secretRef and workloadIdentity, got neither",
    ),
    Case(
        rule="credentials-shape",
        accepted=(credentials(**SECRET), credentials(**IDENTITY), credentials(trainer=SECRET, searcher=SECRET)),
        refused=(
            credentials(),
            credentials(**SECRET, **IDENTITY),
            credentials(trainer=SECRET),
            credentials(**SECRET, trainer=SECRET, searcher=SECRET),
            credentials(**SECRET, trainer=SECRET),
        ),
        told="set one of secretRef and workloadIdentity, or both of trainer and searcher, got 0 of these four",
    ),
    Case(
        rule="autoscaling-needs-maximum",
        accepted=(spec(searcher={"autoscaling": {"mode": "Managed", "maxReplicas": 8}}),),
        refused=(spec(searcher={"autoscaling": {"mode": "Managed"}}),),
        told="maxReplicas is required with mode Managed, got none: set",
    ),
    Case(
        rule="autoscaling-bounds",
        accepted=(spec(searcher={"autoscaling": {"minReplicas": 2, "maxReplicas": 2}}),),
        refused=(spec(searcher={"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}),),
        told="maxReplicas must be >= minReplicas, got 2 < 3: raise maxReplicas",
    ),
    Case(
        rule="deadlines-order",
        accepted=(
            spec(runPolicy={"activeDeadlineSeconds": 600}),
            spec(runPolicy={"activeDeadlineSeconds": 600, "startupDeadlineSeconds": 600}),
        ),
        refused=(spec(runPolicy={"activeDeadlineSeconds": 600, "startupDeadlineSeconds": 601}),),
        told="startupDeadlineSeconds must be <= activeDeadlineSeconds, got 601 > 600: lower it",
    ),
    Case(
        rule="group-fits-visit",
        accepted=(objective(responsesPerPrompt=24),),
        refused=(objective(responsesPerPrompt=30), spec(searcher={"samplesPerPrompt": 8})),
        told="(K) must be <= searcher.samplesPerPrompt (S), got 30 > 24: raise searcher.samplesPerPrompt",
    ),
    Case(
        rule="group-fits-buffer",
        accepted=(spec(buffer={"capacityPerPrompt": 20}),),
        refused=(spec(buffer={"capacityPerPrompt": 10}),),
        told="buffer.capacityPerPrompt must be >= objective.responsesPerPrompt (K), got 10 < 20: raise",
    ),
    Case(
        rule="response-fits-context",
        accepted=(task(sampling={"maxTokens": 1023}),),
        refused=(task(sampling={"maxTokens": 1024}), spec(model={"maxModelLen": 512})),
        told="task.sampling.maxTokens must be < model.maxModelLen, which holds the prompt too, got 1024 >= 1024: lower",
    ),
)

RELEASE = (
    Case(
        rule="release-scores-at-the-trainer",
        accepted=(objective(reference={"scorer": "Trainer"}),),
        refused=(objective(reference={"scorer": "Searcher"}),),
        told="this release scores the reference at the trainer, got Searcher: set scorer: Trainer",
    ),
    Case(
        rule="release-plain-nodes",
        accepted=(
            spec(trainer={"nodes": 1, "gpusPerNode": 1, "compile": True}),
            spec(trainer={"nodes": 2}),
            spec(trainer={"nodes": 4, "gpusPerNode": 8}),
        ),
        refused=(
            spec(trainer={"nodes": 2, "compile": True}),
            spec(trainer={"nodes": 2, "offloadReference": True}),
        ),
        told="nodes > 1 goes with neither compile nor offloadReference, got 2: set both to false, or nodes: 1",
    ),
    Case(
        rule="lora-fixed-reference",
        accepted=(spec(model={"lora": {}}), objective(reference={"type": "EMA", "decay": 0.9})),
        refused=(
            spec(model={"lora": {}}, objective={"reference": {"type": "EMA", "decay": 0.9}}),
            spec(model={"lora": {}}, objective={"reference": {"type": "Reset", "everySteps": 5}}),
        ),
        told="model.lora needs objective.reference.type Fixed: the reference is the model without its adapter, got "
        "EMA: set type: Fixed, or remove model.lora",
    ),
    Case(
        rule="release-lora-no-compile",
        accepted=(spec(model={"lora": {}}, trainer={"compile": False}), spec(trainer={"compile": True})),
        refused=(spec(model={"lora": {}}, trainer={"compile": True}),),
        told="model.lora goes without trainer.compile in this release, got true: set trainer.compile: false, or remove "
        "model.lora",
    ),
    Case(
        rule="compiled-layers-choose",
        accepted=(
            spec(trainer={"compile": True, "activationCheckpointing": "Always"}),
            spec(trainer={"activationCheckpointing": "Selective"}),
        ),
        refused=(spec(trainer={"compile": True, "activationCheckpointing": "Selective"}),),
        told="activationCheckpointing: Selective goes without trainer.compile, got true: set activationCheckpointing: "
        "Auto, or compile: false",
    ),
    Case(
        rule="release-plain-ranks",
        accepted=(
            spec(trainer={}),
            spec(trainer={"gpusPerNode": 0}),
            spec(trainer={"gpusPerNode": 1, "compile": True, "offloadReference": True}),
            spec(trainer={"gpusPerNode": 2}),
        ),
        refused=(
            spec(trainer={"gpusPerNode": 2, "compile": True}),
            spec(trainer={"gpusPerNode": 2, "offloadReference": True}),
        ),
        told="gpusPerNode > 1 goes with neither compile nor offloadReference, got 2: set both to false, or "
        "gpusPerNode: 1",
    ),
)

FROZEN = (
    Case(
        rule="frozen-managed-by",
        stored={},
        accepted=(spec(managedBy="tba.dev/tbajob-controller"), spec(managedBy=None)),
        refused=(spec(managedBy="kueue.x-k8s.io/multikueue"),),
        told="managedBy cannot change, got tba.dev/tbajob-controller -> kueue.x-k8s.io/multikueue",
    ),
    Case(
        rule="frozen-model",
        stored=spec(model={"revision": "a"}),
        accepted=(spec(model={"dtype": "bfloat16", "secretRef": None}),),
        refused=(
            spec(model={"revision": None}),
            spec(model={"revision": "b"}),
            spec(model={"secretRef": {"name": "hf"}}),
            spec(model={"trustRemoteCode": True}),
        ),
        told="model is fixed for the life of a run: leave it, or start a new job with a storage.uri of its own",
    ),
    Case(
        rule="frozen-task",
        stored=task(evaluation={"prompts": {"uri": "s3://b/test.jsonl"}}),
        accepted=(task(sampling={"stop": []}), spec(suspend=True)),
        refused=(
            task(prompts={"split": "all"}),
            task(sampling={"temperature": 0.7}),
            task(sampling={"stop": ["\n"]}),
            task(evaluation={"prompts": None}),
        ),
        told="prompts, sampling and evaluation are fixed for the life of a run",
    ),
    Case(
        rule="frozen-reward",
        stored=task(reward={"parameters": {"weights": [1, 2]}}),
        accepted=(task(reward={"timeoutSeconds": 2.5, "memoryBytes": 4294967296, "workers": 64}),),
        refused=(
            task(reward={"name": "math"}),
            task(reward={"name": None, "entrypoint": "a:b"}),
            task(reward={"parameters": {"weights": [1, 3]}}),
        ),
        told="of reward only timeoutSeconds, memoryBytes and workers may change during a run",
    ),
    Case(
        rule="frozen-objective",
        stored={},
        accepted=(objective(beta=0.05, optimizer={"maxGradNorm": "auto"}), spec(objective=None)),
        refused=(
            objective(beta=0.1),
            objective(optimizer={"maxGradNorm": 1.0}),
            objective(learningRate=1e-4),
            objective(parameters={"ratioAlpha": 0.5}),
        ),
        told="objective is fixed for the life of a run",
    ),
    Case(
        rule="frozen-buffer",
        stored=spec(buffer={"maxPolicyLag": 4}),
        accepted=(
            spec(buffer={"maxTrajectories": 9000, "maxReplayRatio": 3.5, "maxPolicyLag": None, "maxReplayLag": 30}),
        ),
        refused=(
            spec(buffer={"capacityPerPrompt": 50}),
            spec(buffer={"deduplicate": False}),
            spec(buffer={"minInitialTrajectories": 1}),
            spec(buffer={"onPolicyProbability": 0}),
            spec(buffer={"sampling": "Uniform"}),
            spec(buffer={"inverseTemperature": 2}),
        ),
        told="of buffer only maxTrajectories, maxReplayRatio, maxPolicyLag and maxReplayLag may change during a run",
    ),
    Case(
        rule="frozen-storage-uri",
        stored={},
        accepted=(spec(storage={"endpoint": "http://minio:9000", "region": "eu", "credentials": SECRET}),),
        refused=(spec(storage={"uri": "s3://b/other"}),),
        told="storage.uri is where the run lives and cannot change, got s3://b/run -> s3://b/other",
    ),
    Case(
        rule="frozen-fork",
        stored={},
        accepted=(spec(forkFrom=None),),
        refused=(spec(forkFrom={"uri": "s3://b/other", "step": 50}),),
        told="forkFrom is fixed for the life of a run",
    ),
    Case(
        rule="frozen-fork",
        stored=spec(forkFrom={"uri": "s3://b/other", "step": 50}),
        accepted=(spec(forkFrom={"step": 50}),),
        refused=(spec(forkFrom={"step": 100}), spec(forkFrom=None)),
        told="forkFrom is fixed for the life of a run",
    ),
    Case(
        rule="trainer-while-suspended",
        stored=spec(trainer={"image": "a", "podTemplate": {"spec": {"nodeSelector": {"gpu": "a"}}}}),
        accepted=(spec(suspend=True), spec(searcher={"image": "b", "replicas": 5})),
        refused=(
            spec(trainer={"image": "b"}),
            spec(trainer={"image": None}),
            spec(trainer={"env": [{"name": "A", "value": "1"}]}),
            spec(trainer={"podTemplate": {"spec": {"nodeSelector": {"gpu": "b"}}}}),
            spec(suspend=True, trainer={"image": "b"}),
        ),
        told="trainer can change only while the job is suspended: set suspend: true first",
    ),
    Case(
        rule="trainer-while-suspended",
        stored=spec(suspend=True, trainer={"image": "a"}),
        accepted=(spec(trainer={"image": "b"}), spec(suspend=False, trainer={"image": "b"})),
        refused=(),
        told="",
    ),
)

CASES = SHAPE + RELEASE + FROZEN


def job_with(*patches):
    """The smallest job with JSON merge patches applied in order."""
    data = copy.deepcopy(SMALLEST)
    for patch in patches:
        data = merge(data, patch)
    return data


def merge(data, patch):
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(data) if isinstance(data, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def tries():
    """(rule, stored job or None, job, told: None if accepted) of every case."""
    found = []
    for case in CASES:
        before = case.stored or {}
        stored = None if case.stored is None else job_with(before)
        found += [(case.rule, stored, job_with(before, patch), None) for patch in case.accepted]
        told = (case.told, *[""] * len(case.refused))
        found += [(case.rule, stored, job_with(before, p), t) for p, t in zip(case.refused, told, strict=False)]
    return found
