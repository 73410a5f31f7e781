"""Small valid jobs."""

import copy

from tba.contracts.job import TBAJob

SMALLEST = {
    "apiVersion": "tba.dev/v1alpha1",
    "kind": "TBAJob",
    "metadata": {"name": "gsm8k"},
    "spec": {
        "model": {"uri": "hf://a/b"},
        "task": {"prompts": {"uri": "s3://b/train.jsonl"}, "reward": {"name": "gsm8k"}},
        "storage": {"uri": "s3://b/run"},
    },
}


def smallest(**spec):
    """The smallest job file's data with sections of the spec added."""
    data = copy.deepcopy(SMALLEST)
    data["spec"] |= spec
    return data


def smallest_job(**spec):
    """The same as a job."""
    return TBAJob.model_validate(smallest(**spec))
