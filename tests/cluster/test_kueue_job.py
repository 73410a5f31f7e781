"""A job with a queue: it waits for quota, gives it back when it must or when it is over, and goes on where it was."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.cluster_run import ClusterRun
from support.kube_cluster import KubeCluster, until
from support.kueue_controller import Kueue

from tba_operator import kueue

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
NODES = {"kubernetes.io/os": "linux"}
STEPS = 60


@dataclass(frozen=True)
class Queue:
    """A ClusterQueue of two cores, closed, and a LocalQueue of that name."""

    cluster: KubeCluster
    namespace: str
    name: str = "closed"

    def create(self) -> None:
        resources = [{"name": "cpu", "nominalQuota": 2}, {"name": "memory", "nominalQuota": "8Gi"}]
        covered = [resource["name"] for resource in resources]
        group = {"coveredResources": covered, "flavors": [{"name": self.name, "resources": resources}]}
        queue = {"namespaceSelector": {}, "resourceGroups": [group], "stopPolicy": "Hold"}
        self.cluster.apply(
            self._made("ResourceFlavor", {"nodeLabels": NODES}),
            self._made("ClusterQueue", queue),
            self._made("LocalQueue", {"clusterQueue": self.name}, namespace=self.namespace),
        )

    def remove(self) -> None:
        self.cluster.kubectl("-n", self.namespace, "delete", "tbajobs", "--all", "--timeout=60s")
        self.cluster.kubectl("-n", self.namespace, "delete", "localqueue", self.name, "--timeout=30s")
        self.cluster.kubectl("delete", "clusterqueue", self.name, "--timeout=30s")
        self.cluster.kubectl("delete", "resourceflavor", self.name, "--timeout=30s")

    def stop(self, policy: str) -> None:
        """None: it admits again."""
        change = json.dumps({"spec": {"stopPolicy": policy}})
        self.cluster.kubectl("patch", "clusterqueue", self.name, "--type=merge", "-p", change)

    def used_cpu(self) -> str:
        (flavor,) = self.cluster.get("clusterqueue", self.name)["status"]["flavorsReservation"]
        return next(resource["total"] for resource in flavor["resources"] if resource["name"] == "cpu")

    def _made(self, kind: str, spec: dict, **metadata: str) -> dict:
        return {
            "apiVersion": kueue.API_VERSION,
            "kind": kind,
            "metadata": {"name": self.name, **metadata},
            "spec": spec,
        }


@pytest.fixture(scope="module")
def controller(stack, cluster, kubectl, kubeconfig, tmp_path_factory) -> Iterator[Kueue]:
    """The operator looks for Kueue when it starts: it starts again with it, and without it."""
    running = Kueue(kubectl, kubeconfig, cluster.bin, tmp_path_factory.mktemp("kueue"))
    try:
        running.start()
        stack.restart()
        yield running
    finally:
        running.stop()
        running.uninstall()
        stack.restart()


@pytest.fixture(scope="module")
def queue(cluster, controller, base, shared_namespace) -> Iterator[Queue]:
    made = Queue(cluster, shared_namespace)
    made.create()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def run(queue, stack) -> ClusterRun:
    """In a queue that admits nothing yet."""
    stack.secret(queue.namespace)
    queued = ClusterRun(stack, queue.namespace)
    queued.apply(labels={"kueue.x-k8s.io/queue-name": queue.name}, steps=STEPS, searcher={"replicas": 1})
    return queued


def test_a_job_waits_for_its_queue_without_a_pod(run):
    message = run.becomes("Admitted", "False", seconds=30)
    print(message)
    (workload,) = run.stack.cluster.get("-n", run.namespace, "workloads.kueue.x-k8s.io")["items"]
    assert {pod_set["name"]: pod_set["count"] for pod_set in workload["spec"]["podSets"]} == {
        "trainer": 1,
        "searcher": 1,
    }
    assert run.job["status"]["phase"] == "Queued"
    assert run.pods() == []


def test_an_admitted_job_runs_on_the_nodes_of_its_flavor(run, queue):
    queue.stop("None")
    run.becomes("Admitted", seconds=30)
    until("quota for a trainer and a searcher is in use", lambda: queue.used_cpu() == "400m", seconds=30)
    run.reaches(2)
    assert all(NODES.items() <= pod["spec"]["nodeSelector"].items() for pod in run.pods())


def test_an_evicted_job_saves_its_state_and_gives_its_quota_back(run, queue):
    queue.stop("HoldAndDrain")
    run.becomes("Admitted", "False", seconds=30)
    until("its pods are gone", lambda: run.pods() == [], seconds=90)
    until("its quota is free", lambda: queue.used_cpu() == "0", seconds=30)
    assert 0 < run.checkpoint().step < STEPS


def test_a_job_that_is_admitted_again_goes_on_and_its_end_frees_the_quota(run, queue):
    at = run.checkpoint().step
    queue.stop("None")
    run.becomes("Admitted", seconds=30)
    run.becomes("Complete", seconds=300)
    assert run.resumed_at(2) == at
    assert run.job["status"]["trainer"]["attempt"] == 2
    until("its quota is free", lambda: queue.used_cpu() == "0", seconds=60)
