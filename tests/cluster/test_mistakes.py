"""The ten likeliest mistakes of a user: each gets a message that tells what to do, at apply time where possible."""

from typing import Any

import pytest
from support.cluster_run import ClusterRun
from support.kube_cluster import ClusterError

NOT_AT_APPLY: dict[str, dict[str, Any]] = {
    "bucket": {"storage": {"uri": "s3://no-such-bucket/run"}},
    "secret": {"storage": {"credentials": {"secretRef": {"name": "no-such-secret"}}}},
    "image": {"trainer": {"image": "docker.io/tba/no-such-image:1", "imagePullPolicy": "Never"}},
    "gpu": {"trainer": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}},
    "reward": {"task": {"reward": {"name": None, "entrypoint": "no_such_module:reward"}}},
    "dataset": {"task": {"prompts": {"uri": "s3://tba/no/such/train.jsonl"}}},
}
"""Job -> the mistake in its spec, for those that only its pods can tell."""


@pytest.fixture(scope="module")
def place(stack, base, shared_namespace) -> str:
    """With all jobs of `NOT_AT_APPLY`, applied at once, so that their imports and their waits are one. No searchers:
    it is the trainer that tries what a job names."""
    stack.secret(shared_namespace)
    for name, mistake in NOT_AT_APPLY.items():
        ClusterRun(stack, shared_namespace, name).apply(**{"searcher": {"replicas": 0}, **mistake})
    return shared_namespace


@pytest.fixture
def wrong(stack, place):
    """A job of `NOT_AT_APPLY` by its name."""
    return lambda name: ClusterRun(stack, place, name)


@pytest.fixture
def good(stack, shared_namespace) -> dict[str, Any]:
    """A good job, to make one mistake in."""
    return ClusterRun(stack, shared_namespace, "good").manifest()


def refused(stack, namespace, manifest) -> str:
    """What kubectl says to a job that the API server refuses."""
    with pytest.raises(ClusterError) as error:
        stack.apply(namespace, manifest)
    return str(error.value)


def test_a_typo_in_a_field_is_refused_with_its_name(stack, place, good):
    good["spec"]["objective"]["learningrate"] = 0.1
    assert "learningrate" in refused(stack, place, good)


def test_too_long_a_name_is_refused_with_the_limit(stack, place, good):
    good["metadata"]["name"] = "a" * 41
    assert "40" in refused(stack, place, good)


def test_k_above_s_is_refused_with_the_remedy(stack, place, good):
    good["spec"]["searcher"]["samplesPerPrompt"] = 3
    message = refused(stack, place, good)
    assert "samplesPerPrompt" in message and "responsesPerPrompt" in message and "raise" in message


def test_a_wrong_bucket_fails_the_job_with_the_buckets_name(wrong):
    message = wrong("bucket").becomes("Failed", reason="UserError")
    assert "no-such-bucket" in message and "create" in message.lower()


def test_a_missing_secret_is_named_with_the_keys_that_it_needs(wrong):
    message = wrong("secret").becomes("Degraded", reason="SecretNotFound")
    assert "no-such-secret" in message and "AWS_ACCESS_KEY_ID" in message


def test_an_image_that_does_not_exist_is_named(wrong):
    message = wrong("image").becomes("Degraded", reason="ImagePullFailed")
    assert "no-such-image" in message and "imagePullSecrets" in message


def test_no_gpu_node_is_unschedulable_not_failed(wrong):
    job = wrong("gpu")
    message = job.becomes("Degraded", reason="Unschedulable")
    assert "nvidia.com/gpu" in message and "waits" in message
    assert job.condition("Failed")["status"] == "False"


def test_a_bad_reward_path_fails_the_job_with_the_path(wrong):
    assert "no_such_module" in wrong("reward").becomes("Failed", reason="UserError")


def test_an_unreachable_dataset_fails_the_job_with_its_uri(wrong):
    assert "s3://tba/no/such/train.jsonl" in wrong("dataset").becomes("Failed", reason="UserError")


def test_two_jobs_on_one_prefix_the_second_is_refused(stack, place):
    first, second = (ClusterRun(stack, place, name) for name in ("first", "second"))
    first.apply(steps=5, searcher={"replicas": 1})
    first.becomes("Complete", seconds=300)
    second.apply(storage={"uri": first.uri}, searcher={"replicas": 0})
    message = second.becomes("Failed", reason="UserError")
    assert f"{place}/first" in message and "adopt" in message
