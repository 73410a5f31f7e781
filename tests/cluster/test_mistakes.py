"""The ten likeliest mistakes of a user: each gets a message that tells what to do, at apply time where possible."""

import pytest
from support.kube_cluster import ClusterError, until
from support.tba_stack import condition, example


@pytest.fixture
def job(stack, base, namespace):
    """A good job, to make one mistake in."""
    stack.secret(namespace)
    manifest = example()
    manifest["spec"]["storage"]["uri"] = f"s3://tba/runs/{namespace}"
    manifest["spec"]["objective"]["totalSteps"] = 5
    return manifest


def refused(stack, namespace, manifest) -> str:
    """What kubectl says to a job that the API server refuses."""
    with pytest.raises(ClusterError) as error:
        stack.apply(namespace, manifest)
    return str(error.value)


def told(stack, namespace, manifest, kind: str, reason: str, seconds: float = 120) -> str:
    """The message of a condition of an applied job, once it has that reason."""
    stack.apply(namespace, manifest)
    name = manifest["metadata"]["name"]

    def probe() -> str | None:
        found = condition(stack.job(namespace, name), kind)
        return found["message"] if found.get("status") == "True" and found["reason"] == reason else None

    message = until(f"{kind}/{reason}", probe, seconds=seconds)
    print(f"{kind}/{reason}: {message}")
    return message


def test_a_typo_in_a_field_is_refused_with_its_name(stack, namespace, job):
    job["spec"]["objective"]["learningrate"] = 0.1
    assert "learningrate" in refused(stack, namespace, job)


def test_too_long_a_name_is_refused_with_the_limit(stack, namespace, job):
    job["metadata"]["name"] = "a" * 41
    assert "40" in refused(stack, namespace, job)


def test_k_above_s_is_refused_with_the_remedy(stack, namespace, job):
    job["spec"]["searcher"]["samplesPerPrompt"] = 4
    message = refused(stack, namespace, job)
    assert "samplesPerPrompt" in message and "responsesPerPrompt" in message and "raise" in message


def test_a_wrong_bucket_fails_the_job_with_the_buckets_name(stack, namespace, job):
    job["spec"]["storage"]["uri"] = "s3://no-such-bucket/run"
    message = told(stack, namespace, job, "Failed", "UserError")
    assert "no-such-bucket" in message and "create" in message.lower()


def test_a_missing_secret_is_named_with_the_keys_that_it_needs(stack, namespace, job):
    job["spec"]["storage"]["credentials"] = {"secretRef": {"name": "no-such-secret"}}
    message = told(stack, namespace, job, "Degraded", "SecretNotFound")
    assert "no-such-secret" in message and "AWS_ACCESS_KEY_ID" in message


def test_an_image_that_does_not_exist_is_named(stack, namespace, job):
    job["spec"]["trainer"] = {"image": "docker.io/tba/no-such-image:1", "imagePullPolicy": "Never"}
    message = told(stack, namespace, job, "Degraded", "ImagePullFailed")
    assert "no-such-image" in message and "imagePullSecrets" in message


def test_no_gpu_node_is_unschedulable_not_failed(stack, namespace, job):
    job["spec"]["trainer"] = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    message = told(stack, namespace, job, "Degraded", "Unschedulable")
    assert "nvidia.com/gpu" in message and "waits" in message
    assert condition(stack.job(namespace, job["metadata"]["name"]), "Failed")["status"] == "False"


def test_a_bad_reward_path_fails_the_job_with_the_path(stack, namespace, job):
    job["spec"]["task"]["reward"] = {"entrypoint": "no_such_module:reward"}
    message = told(stack, namespace, job, "Failed", "UserError")
    assert "no_such_module" in message


def test_an_unreachable_dataset_fails_the_job_with_its_uri(stack, namespace, job):
    job["spec"]["task"]["prompts"]["uri"] = "s3://tba/no/such/train.jsonl"
    message = told(stack, namespace, job, "Failed", "UserError")
    assert "s3://tba/no/such/train.jsonl" in message


def test_two_jobs_on_one_prefix_the_second_is_refused(stack, namespace, job):
    stack.apply(namespace, job)
    stack.wait_condition(namespace, "arithmetic", "Complete", seconds=300)
    job["metadata"]["name"] = "second"
    message = told(stack, namespace, job, "Failed", "UserError")
    assert f"{namespace}/arithmetic" in message and "adopt" in message
