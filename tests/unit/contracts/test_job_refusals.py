"""Every refusal names the field, what it got and the remedy."""

import copy

import pytest
from pydantic import ValidationError
from support.jobs import SMALLEST, smallest

from tba.contracts.errors import UserError
from tba.contracts.explain import closest, explain
from tba.contracts.job import TBAJob


def refusal(path, value):
    data = copy.deepcopy(SMALLEST)
    place = data
    *parents, last = path.split(".")
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    with pytest.raises(ValidationError) as caught:
        TBAJob.model_validate(data)
    error = explain(caught.value, "job.yaml")
    assert isinstance(error, UserError)
    return str(error)


def test_the_smallest_job_is_valid_and_has_the_documented_defaults():
    spec = TBAJob.model_validate(SMALLEST).spec
    assert (spec.objective.responses_per_prompt, spec.objective.prompts_per_batch) == (20, 7)
    assert (spec.sync.interval_steps, spec.buffer.on_policy_probability) == (2, 0.95)
    assert spec.searcher.engine.type == "vllm"


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("spec.objective.beta", -1, "spec.objective.beta: must be > 0, got -1; set a value > 0 (default 0.05)"),
        ("spec.buffer.inverseTemperature", "1e400", "inverseTemperature: input should be a finite number, got '1e400'"),
        ("spec.objective.optimizer.weightDecay", float("inf"), "weightDecay: input should be a finite number, got inf"),
        ("spec.storage.graceSeconds", float("inf"), "graceSeconds: input should be a finite number, got inf"),
        (
            "spec.searcher.autoscaling.targetReplayRatio",
            float("inf"),
            "targetReplayRatio: input should be a finite number, got inf",
        ),
        (
            "spec.task.reward.parameters",
            {"range": [0, float("nan")]},
            "spec.task.reward.parameters: numbers must be finite, got {'range': [0, nan]}: write them as text",
        ),
        ("spec.objective.beta", "much", "spec.objective.beta: must be a number, got 'much'"),
        ("spec.objective.totalSteps", 1.5, "spec.objective.totalSteps: must be a whole number, got 1.5"),
        ("spec.task.reward.memoryBytes", 1, "spec.task.reward.memoryBytes: must be >= 67108864, got 1"),
        ("spec.objective.responses_per_prompt", 1, "spec.objective.responsesPerPrompt: must be >= 2, got 1"),
        (
            "spec.searcher.engine.type",
            "vlm",
            "spec.searcher.engine.type: must be vllm, transformers or fake, got 'vlm'",
        ),
        ("kind", "Job", "kind: must be TBAJob, got 'Job'; write TBAJob"),
        (
            "spec.trainer",
            {"nodes": 2, "offloadReference": True},
            "nodes > 1 goes with neither compile nor offloadReference, got 2: set both to false, or nodes: 1",
        ),
        (
            "spec.trainer",
            {"nodes": 2, "colocatedSearcher": {"enabled": True}},
            "colocatedSearcher shares one GPU with the trainer, got nodes 2: set nodes: 1, or add searcher.replicas",
        ),
        (
            "spec.trainer",
            {"activationCheckpointing": "Selective", "compile": True},
            "activationCheckpointing: Selective goes without trainer.compile, got true",
        ),
        (
            "spec.trainer",
            {"gpusPerNode": 2, "compile": True},
            "gpusPerNode > 1 goes with neither compile nor offloadReference, got 2: set both to false, or",
        ),
        ("spec.storage.uri", "gs://b", "spec.storage.uri: must match ^(s3|file)://.+, got 'gs://b'"),
        ("spec.model", None, "spec.model: must be a mapping of fields, got None"),
        ("spec.task.prompts", {}, "spec.task.prompts: set exactly one of uri and configMapRef, got {}"),
        ("spec.objective.responsesPerPrompt", 30, "(K) must be <= searcher.samplesPerPrompt (S), got 30 > 24: raise"),
        ("spec.buffer.capacityPerPrompt", 10, "capacityPerPrompt must be >= objective.responsesPerPrompt (K), got 10"),
        ("spec.task.sampling.maxTokens", 2048, "maxTokens must be < model.maxModelLen, got 2048 >= 1024: lower"),
        (
            "spec.task.sampling.stop",
            ["\n", ""],
            "spec.task.sampling.stop[1]: ",
        ),  # every text has it: one token a response
        (
            "spec.trainer.resources",
            {"requests": {"memory": "8GiB"}},
            "spec.trainer.resources.requests.memory: must be a whole number, got '8GiB' or must be a number",
        ),
        ("spec.trainer.resources", {"request": {}}, "spec.trainer.resources.request: must be limits or requests, got"),
        ("spec.objective.betaFinal", 0.1, "betaFinal and betaAnnealSteps go together"),
        ("spec.objective.parameters", {"x": 1}, "parameters of TrajectoryBalance are ratioAlpha, ratioClip, "),
        ("spec.objective.parameters", {"ratioClip": 0}, "parameters.ratioClip must be > 0, got 0"),
        ("spec.objective.parameters", {"ratioAlpha": True}, "parameters.ratioAlpha must be in [0, 1], got True"),
        ("spec.objective.parameters", {"baselineShift": -1}, "parameters.baselineShift must be >= 0, got -1"),
        ("spec.objective.reference", {"type": "Reset"}, "everySteps goes with type Reset"),
        ("spec.task.evaluation", {"samples": 4}, "samples must be 1 with greedy sampling, got 4: set sampling: sample"),
        ("spec.task.reward.entrypoint", "pkg.mod:fn", "set exactly one of name, entrypoint and configMapRef, got 2"),
        ("spec.storage.credentials", {}, "set one of secretRef and workloadIdentity, or both of trainer and searcher"),
        (
            "spec.runPolicy.failureRules",
            [{"action": "Cry", "onExitCodes": [1]}],
            "failureRules[0].action: must be Fail",
        ),
        ("metadata.name", "Gsm_8k", "metadata.name: must match"),
        ("kind", "Job", "kind: must be TBAJob, got 'Job'"),
    ],
)
def test_a_refusal_names_the_field_what_it_got_and_the_remedy(path, value, told):
    text = refusal(path, value)
    assert text.startswith("job.yaml: 1 problem\n")
    assert told in text
    assert "got" in text
    assert ";" in text or ": " in text.splitlines()[1]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("spec.objective.bta", "spec.objective.bta: unknown field, got 1; did you mean beta?"),
        ("spec.objective.total_step", "did you mean totalSteps?"),
        ("spec.objectve", "spec.objectve: unknown field, got 1; did you mean objective?"),
        ("spec.storage.zzz", "spec.storage.zzz: unknown field, got 1; remove it; known here: uri, endpoint"),
    ],
)
def test_an_unknown_field_is_an_error_that_names_the_closest(path, told):
    assert told in refusal(path, 1)


def test_a_missing_field_is_named():
    data = copy.deepcopy(SMALLEST)
    del data["spec"]["model"]["uri"]
    with pytest.raises(ValidationError) as caught:
        TBAJob.model_validate(data)
    assert "spec.model.uri: is required, got nothing" in str(explain(caught.value, "job.yaml"))


def test_a_union_is_one_problem_without_the_tags_of_its_branches():
    text = refusal("spec.objective.optimizer.maxGradNorm", -1)
    assert "spec.objective.optimizer.maxGradNorm: must be auto, got -1 or must be > 0, got -1" in text


def test_all_problems_are_told_at_once():
    data = copy.deepcopy(SMALLEST)
    data["spec"]["objective"] = {"beta": 0, "bet": 1}
    with pytest.raises(ValidationError) as caught:
        TBAJob.model_validate(data)
    assert "2 problems" in str(explain(caught.value, "job.yaml"))


def test_a_long_value_is_cut():
    assert len(refusal("spec.objective.beta", "x" * 5000)) < 400


def test_a_word_far_from_every_known_one_has_no_closest():
    assert closest("zebra", ["beta", "totalSteps"]) is None
    assert closest("total_steps", ["beta", "totalSteps"]) == "totalSteps"


def test_the_trainer_process_is_told_of_a_colocated_searcher():
    settings = {"colocatedSearcher": {"enabled": True, "freeMemory": True}}
    told = TBAJob.model_validate(smallest(trainer=settings)).spec.live_config().trainer.colocated_searcher
    assert (told.enabled, told.free_memory) == (True, True)
