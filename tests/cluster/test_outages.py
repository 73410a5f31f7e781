"""What stands still around a job: an API server that answers nobody, an operator that is not there."""

import json
import time

import pytest
from support.cluster_faults import stop_apiserver
from support.kube_cluster import KubeCluster, until
from support.processes import job_for
from support.tba_stack import OPERATOR_NAMESPACE, Stack, progress, ready

FROZEN_SECONDS = 100.0
FOLLOWED_SECONDS = 30.0
NAME = "tiny"
PLAIN = "configmaps,services,serviceaccounts,networkpolicies"
"""Children that nothing but the operator writes, and that know nothing of the number of searchers."""


@pytest.fixture(scope="module")
def job(stack, shared_namespace, tmp_path_factory) -> str:
    """The namespace of a job that trains a tiny model on made-up answers: little work, all the machinery."""
    uri = f"s3://tba/runs/{shared_namespace}"
    stack.secret(shared_namespace)
    stack.apply(shared_namespace, tiny_job(stack, uri, tmp_path_factory.mktemp("tiny")))
    stack.wait_condition(shared_namespace, NAME, "SearchersReady", seconds=120)
    stack.wait_step(shared_namespace, NAME, 2, seconds=60)
    return shared_namespace


def tiny_job(stack: Stack, uri: str, folder) -> dict:
    """As of the integration tests, with model and prompts in the bucket."""
    resources = {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    made = job_for(folder, uri).model_dump(mode="json", by_alias=True, exclude_unset=True)
    with stack.store(f"{uri}-input") as store:
        for path in (*sorted((folder / "model").iterdir()), folder / "train.jsonl"):
            store.put_once(str(path.relative_to(folder)), path.read_bytes())
    spec = made["spec"]
    spec["model"]["uri"] = f"{uri}-input/model"
    spec["task"]["prompts"]["uri"] = f"{uri}-input/train.jsonl"
    spec["storage"] |= {"endpoint": "http://minio.minio.svc:9000", "credentials": {"secretRef": {"name": "tba-s3"}}}
    spec["objective"]["totalSteps"] = 100_000
    spec["sync"] = {"pollIntervalSeconds": 2}
    spec["buffer"]["maxReplayRatio"] = 1
    spec["trainer"] = {"resources": resources, "terminationGracePeriodSeconds": 10}
    spec["searcher"] |= {"replicas": 1, "resources": resources, "terminationGracePeriodSeconds": 10}
    spec["searcher"]["engine"]["extraArgs"]["tokensPerSecond"] = 400
    return made


def versions(cluster: KubeCluster, namespace: str) -> dict[str, str]:
    """resourceVersion of each plain child: a write that changed nothing would leave it too."""
    found = cluster.get("-n", namespace, PLAIN, "-l", f"tba.dev/job-name={NAME}")["items"]
    return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in found}


def identities(cluster: KubeCluster, namespace: str, kind: str) -> set[str]:
    """uids of a job's objects of a kind."""
    found = cluster.get("-n", namespace, kind, "-l", f"tba.dev/job-name={NAME}")["items"]
    return {one["metadata"]["uid"] for one in found}


def told(cluster: KubeCluster, namespace: str, reason: str) -> list[dict]:
    """Events about the job."""
    fields = f"involvedObject.kind=TBAJob,involvedObject.name={NAME},reason={reason}"
    return cluster.get("-n", namespace, "events", "--field-selector", fields)["items"]


@pytest.mark.timeout(420)
def test_after_a_frozen_api_server_a_change_is_followed_and_nothing_is_written_twice(stack, job):
    cluster = stack.cluster
    plain, searchers = versions(cluster, job), cluster.get("-n", job, "statefulset", f"{NAME}-searcher")
    attempts = identities(cluster, job, "jobs")
    (trainer,) = stack.pods(job, "trainer")
    step = progress(stack.job(job, NAME))["step"]

    stop_apiserver(cluster, FROZEN_SECONDS)
    cluster.kubectl("-n", job, "scale", f"tbajob/{NAME}", "--replicas=2")
    began = time.monotonic()

    def followed() -> dict | None:
        found = cluster.get("-n", job, "statefulset", f"{NAME}-searcher")
        return found if found["spec"]["replicas"] == 2 else None

    after = until("the StatefulSet follows the scale", followed, seconds=FOLLOWED_SECONDS)
    print(f"followed after {time.monotonic() - began:.1f} s")
    until("both searchers", lambda: sum(map(ready, stack.pods(job, "searcher"))) == 2, seconds=90)
    assert after["metadata"]["uid"] == searchers["metadata"]["uid"]
    assert after["metadata"]["generation"] == searchers["metadata"]["generation"] + 1
    assert versions(cluster, job) == plain
    assert identities(cluster, job, "jobs") == attempts
    assert [pod["metadata"]["uid"] for pod in stack.pods(job, "trainer")] == [trainer["metadata"]["uid"]]
    assert [e.get("count") or 1 for e in told(cluster, job, "SearchersScaled")] == [1]
    stack.wait_step(job, NAME, step + 1, seconds=60)


@pytest.mark.timeout(240)
def test_a_namespace_goes_with_its_running_job_while_the_operator_is_away(stack, job):
    cluster = stack.cluster
    operator = ("-n", OPERATOR_NAMESPACE, "scale", "deployment", "-l", "app.kubernetes.io/name=tba-operator")
    cluster.kubectl(*operator, "--replicas=0")
    try:
        away = ("-n", OPERATOR_NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=tba-operator", "-o", "name")
        until("the operator is away", lambda: cluster.kubectl(*away) == "", seconds=60)
        assert stack.pods(job, "trainer"), "the run goes on without it"
        began = time.monotonic()
        cluster.kubectl("delete", "namespace", job, "--wait", "--timeout=90s")
        print(f"gone after {time.monotonic() - began:.1f} s")
        left = json.loads(cluster.kubectl("get", "tbajobs", "-A", "-o", "json"))["items"]
        assert [one for one in left if one["metadata"]["namespace"] == job] == []
    finally:
        cluster.kubectl(*operator, "--replicas=1")
