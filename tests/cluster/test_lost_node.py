"""A node loses power and its Node object stays: nobody ever ends its pods, and the run goes on elsewhere."""

import time
from collections.abc import Iterator

import pytest
from support import cluster_faults as faults
from support.cluster_run import ClusterRun
from support.kube_cluster import KubeCluster, until
from support.tba_stack import OPERATOR_NAMESPACE, Stack

GRACE_SECONDS = 5
LOST_AFTER_SECONDS = 10 + 10 + GRACE_SECONDS + 60
"""NotReady, eviction, grace period, and what the operator waits on top."""
SLACK_SECONDS = 30


def node_of(pod: dict) -> str:
    return pod["spec"]["nodeName"]


def move_operator(stack: Stack, node: str) -> None:
    """Away from a node that is cordoned."""
    cluster, place = stack.cluster, ("-n", OPERATOR_NAMESPACE)
    pods = [p for p in cluster.get(*place, "pods")["items"] if node_of(p) == node]
    for pod in pods:
        cluster.kubectl(*place, "delete", "pod", pod["metadata"]["name"], "--timeout=60s")
    cluster.kubectl(*place, "rollout", "status", "deployment", "-l", "app.kubernetes.io/name=tba-operator")


@pytest.fixture
def victim(cluster: KubeCluster, stack, base, namespace) -> Iterator[str]:
    """A node without storage and operator, the only one that takes pods; started again before the namespace goes."""
    (storage,) = cluster.get("-n", "minio", "pods")["items"]
    names = {node["metadata"]["name"] for node in cluster.get("nodes")["items"]}
    (name,) = names - {node_of(storage)}
    cluster.kubectl("cordon", name)
    move_operator(stack, name)
    cluster.kubectl("uncordon", name)
    cluster.kubectl("cordon", node_of(storage))
    try:
        yield name
    finally:
        cluster.kubectl("uncordon", node_of(storage))
        faults.start_node(cluster, name)
        faults.wait_ready(cluster, name)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_the_pods_of_a_node_without_power_are_replaced_elsewhere(stack, cluster, victim, namespace):
    stack.secret(namespace)
    run = ClusterRun(stack, namespace)
    grace = {"terminationGracePeriodSeconds": GRACE_SECONDS}
    run.apply(trainer=grace, searcher={**grace, "replicas": 1})
    run.reaches(5)
    for node in cluster.get("nodes")["items"]:
        cluster.kubectl("uncordon", node["metadata"]["name"])
    (trainer,), (searcher,) = run.pods("trainer"), run.pods("searcher")
    assert node_of(trainer) == node_of(searcher) == victim

    faults.cut_power(cluster, victim)
    cut = time.monotonic()

    def taken_over() -> bool:
        return any(node_of(p) != victim for p in run.pods("trainer") if p["spec"].get("nodeName"))

    until("attempt 2 elsewhere", taken_over, seconds=LOST_AFTER_SECONDS + SLACK_SECONDS)
    print(f"the next trainer's pod {time.monotonic() - cut:.0f} s after the power cut")
    assert time.monotonic() - cut > LOST_AFTER_SECONDS - 15, "sooner than a node may be given up"
    assert run.job["status"]["trainer"]["attempt"] == 2
    assert len(run.pods("trainer")) <= 2

    def replaced() -> bool:
        pods = run.ready_pods("searcher")
        return bool(pods) and all(node_of(p) != victim for p in pods)

    until("the searcher elsewhere", replaced, seconds=120)
    assert searcher["metadata"]["uid"] not in run.uids("searcher")
    run.becomes("TrainerReady", seconds=120)
