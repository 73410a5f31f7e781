"""The real Kueue controller, with its webhooks, takes the Workloads that we make; what we write back frees quota."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kube_cluster import ClusterError, until
from support.kueue_controller import Kueue

from tba_operator import kueue, manifests
from tba_operator.api import Images, Job, parse_job
from tba_operator.world import ref_of

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "tbajobs.tba.dev.yaml"
IMAGES = Images(trainer="tba/trainer:test", searcher="tba/searcher:test")
NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def controller(cluster, kubeconfig, kubectl, tmp_path_factory):
    """Kueue beside the cluster, and the kind TBAJob in it."""
    if not (cluster.bin / "kueue").exists():
        pytest.fail("Kueue is not built: tests/cluster/companions/kueue/build.sh", pytrace=False)
    had_crd = "tbajobs" in kubectl("get", "crd", "-o", "name")
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    until("TBAJobs are served", lambda: kubectl("get", "tbajobs", "-A", "-o", "json"))
    running = Kueue(kubectl, kubeconfig, cluster.bin, tmp_path_factory.mktemp("kueue"))
    try:
        running.start()
        yield running
    finally:
        running.stop()
        running.uninstall()
        if not had_crd:
            kubectl("delete", "crd", "tbajobs.tba.dev", "--timeout=60s")


@dataclass
class Queue:
    """A ClusterQueue of some cores with one flavor, its LocalQueue, and jobs in them."""

    kubectl: Any
    namespace: str
    name: str

    def create(self, cpu: int, local: str = "team") -> "Queue":
        """Everything that a job needs to be admitted."""
        flavor = {"nodeLabels": {"pool": self.name}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
        group = {
            "coveredResources": ["cpu"],
            "flavors": [{"name": self.name, "resources": [{"name": "cpu", "nominalQuota": cpu}]}],
        }
        preemption = {"withinClusterQueue": "LowerPriority"}
        queue = {"namespaceSelector": {}, "resourceGroups": [group], "preemption": preemption}
        self.apply(made("ResourceFlavor", self.name, flavor))
        self.apply(made("ClusterQueue", self.name, queue))
        self.apply(made("LocalQueue", local, {"clusterQueue": self.name}, self.namespace))
        return self

    def apply(self, manifest: dict[str, Any]) -> None:
        """As the controller does."""
        arguments = ("apply", "--server-side", "--force-conflicts", "--field-manager=tba-operator", "-f", "-")
        self.kubectl(*arguments, input=json.dumps(manifest))

    def remove(self) -> None:
        """In the order in which nothing is in use any more."""
        self.kubectl("-n", self.namespace, "delete", "jobs,statefulsets,tbajobs,workloads", "--all", "--timeout=30s")
        self.kubectl("-n", self.namespace, "delete", "localqueues", "--all", "--timeout=30s")
        self.kubectl("delete", "clusterqueue", self.name, "--timeout=30s")

    def resize(self, cpu: int) -> None:
        path = "/spec/resourceGroups/0/flavors/0/resources/0/nominalQuota"
        change = [{"op": "replace", "path": path, "value": str(cpu)}]
        self.kubectl("patch", "clusterqueue", self.name, "--type=json", "-p", json.dumps(change))

    def stop(self, policy: str) -> None:
        self.kubectl(
            "patch", "clusterqueue", self.name, "--type=merge", "-p", json.dumps({"spec": {"stopPolicy": policy}})
        )

    def uses(self, cores: int) -> bool:
        """Whether so many cores are reserved, or soon are."""
        return until(f"{cores} cores reserved", lambda: self._reserved() == str(cores), seconds=30)

    def _reserved(self) -> str:
        status = self.read("clusterqueue", self.name).get("status", {})
        return next(iter(status.get("flavorsReservation", [])), {}).get("resources", [{}])[0].get("total", "0")

    def read(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        place = ("-n", namespace) if namespace else ()
        return json.loads(self.kubectl(*place, "get", kind, name, "-o", "json"))

    def job(self, name: str, *, searchers: int = 1, priority: str | None = None, **spec: Any) -> Job:
        """A TBAJob whose trainer takes 2 cores and each searcher 1."""
        labels = {"kueue.x-k8s.io/queue-name": "team"} | (
            {"kueue.x-k8s.io/priority-class": priority} if priority else {}
        )
        self.apply(
            {
                "apiVersion": "tba.dev/v1alpha1",
                "kind": "TBAJob",
                "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
                "spec": {
                    "model": {"uri": "hf://org/model"},
                    "task": {"prompts": {"uri": "s3://b/p.jsonl"}, "reward": {"name": "fake"}},
                    "storage": {"uri": "s3://b/run"},
                    "trainer": {"gpusPerNode": 0, "resources": {"requests": {"cpu": "2"}}},
                    "searcher": {
                        "replicas": searchers,
                        "engine": {"type": "fake"},
                        "resources": {"requests": {"cpu": "1"}},
                    },
                    **spec,
                },
            }
        )
        return parse_job(self.read("tbajob", name, self.namespace))

    def desired(self, job: Job, count: int, current: dict[str, Any] | None = None) -> dict[str, Any]:
        """The Workload as the controller renders it."""
        named = kueue.priority_class(job)
        return kueue.workload(
            job,
            manifests.trainer_job(job, IMAGES, 1)["spec"]["template"],
            manifests.searcher_set(job, IMAGES, count)["spec"]["template"],
            count,
            current=current,
            priority_class=self.read("workloadpriorityclass", named.name) if named else None,
        )

    def submit(self, job: Job, count: int = 1) -> None:
        self.apply(self.desired(job, count))

    def workload(self, job: Job) -> dict[str, Any]:
        return self.read("workload", f"{job.name}-tba", self.namespace)

    def admission(self, job: Job) -> kueue.Admission:
        found = self.workload(job)
        flavors = {name: self.read("resourceflavor", name) for name in kueue.flavor_names(found)}
        return kueue.admission(found, flavors)

    def settle(self, job: Job, *, pods_left: bool = False, ready: bool = False) -> bool:
        """Write what the job owes its Workload; whether it owed anything."""
        owed = kueue.settled(job, self.workload(job), pods_left=pods_left, ready=ready, now=NOW)
        if owed is not None:
            self.kubectl("replace", "--subresource=status", "-f", "-", input=json.dumps(owed))
        return owed is not None

    def reaches(self, job: Job, state: str) -> kueue.Admission:
        until(f"{job.name} {state}", lambda: self.admission(job).state == state, seconds=30)
        return self.admission(job)

    def stays_waiting(self, job: Job, word: str) -> None:
        until(f"{job.name} waits", lambda: word in self.admission(job).message, seconds=30)
        assert self.admission(job).state == "Waiting"


def made(kind: str, name: str, spec: dict[str, Any], namespace: str | None = None) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": kueue.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


@pytest.fixture
def queue(request, controller, kubectl, namespace):
    """4 cores."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[-30:].strip("-")
    found = Queue(kubectl, namespace, f"q-{name}").create(4)
    yield found
    found.remove()
    kubectl("delete", "resourceflavor", found.name, "--timeout=30s")


def test_a_workload_is_admitted_and_says_where_its_pods_go(queue):
    job = queue.job("one", searchers=2)
    queue.submit(job, 2)
    found = queue.reaches(job, "Admitted")
    assert found.searcher_count == 2
    assert found.trainer is not None
    assert dict(found.trainer.node_selector) == {"pool": queue.name}
    assert found.trainer.tolerations == ({"key": "spot", "operator": "Exists"},)
    assert queue.uses(4)


def test_what_we_apply_again_changes_nothing(queue):
    job = queue.job("one")
    queue.submit(job)
    queue.reaches(job, "Admitted")
    before = queue.workload(job)
    queue.apply(queue.desired(job, 1, current=before))
    assert queue.workload(job)["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_reserved_quota_freezes_the_spec_for_kueue_and_for_us(queue):
    job = queue.job("one")
    queue.submit(job)
    queue.reaches(job, "Admitted")
    with pytest.raises(ClusterError, match="immutable"):
        queue.apply(queue.desired(job, 2))
    queue.apply(queue.desired(job, 2, current=queue.workload(job)))
    assert kueue.clamp(2, queue.admission(job))[0] == 1


def test_it_waits_while_quota_is_too_small_and_runs_when_it_is_not(queue):
    queue.resize(2)
    job = queue.job("one")
    queue.submit(job)
    queue.stays_waiting(job, "insufficient")
    queue.resize(3)
    queue.reaches(job, "Admitted")


def test_fewer_searchers_are_admitted_if_not_all_fit(queue):
    job = queue.job("one", searchers=9)
    queue.submit(job, 9)
    assert queue.reaches(job, "Admitted").searcher_count == 2


def test_a_stopped_queue_evicts_and_has_its_quota_back_once_the_pods_are_gone(queue):
    job = queue.job("one")
    queue.submit(job)
    queue.reaches(job, "Admitted")
    queue.stop("HoldAndDrain")
    assert "ClusterQueueStopped" in queue.reaches(job, "Evicted").message
    assert not queue.settle(job, pods_left=True)
    assert queue.uses(3)
    assert queue.settle(job)
    assert queue.uses(0)
    assert queue.admission(job).state == "Waiting"
    queue.stop("None")
    queue.reaches(job, "Admitted")


def test_a_more_important_job_takes_the_place_when_the_pods_are_gone(queue, kubectl):
    important = {**made("WorkloadPriorityClass", "high", {}), "value": 1000}
    del important["spec"]
    queue.apply(important)
    low = queue.job("low")
    queue.submit(low)
    queue.reaches(low, "Admitted")
    high = queue.job("high", priority="high")
    queue.submit(high)
    assert "Preempted" in queue.reaches(low, "Evicted").message
    assert queue.admission(high).state == "Waiting"
    queue.settle(low)
    queue.reaches(high, "Admitted")
    queue.stays_waiting(low, "")
    kubectl("-n", queue.namespace, "delete", "workload", "high-tba")
    queue.reaches(low, "Admitted")


def test_a_deactivated_workload_stops_and_starts_again(queue, kubectl):
    job = queue.job("one")
    queue.submit(job)
    queue.reaches(job, "Admitted")
    patch = ("-n", queue.namespace, "patch", "workload", "one-tba", "--type=merge", "-p")
    kubectl(*patch, '{"spec":{"active":false}}')
    queue.reaches(job, "Evicted")
    until("Kueue has evicted it", lambda: queue.settle(job), seconds=30)
    assert queue.uses(0)
    queue.apply(queue.desired(job, 1, current=queue.workload(job)))
    assert queue.admission(job).state == "Evicted"  # our apply does not switch it on again
    kubectl(*patch, '{"spec":{"active":true}}')
    queue.reaches(job, "Admitted")


def test_the_end_of_a_job_lets_the_next_one_in(queue, kubectl):
    first, second = queue.job("first"), queue.job("second")
    queue.submit(first)
    queue.reaches(first, "Admitted")
    queue.submit(second)
    queue.stays_waiting(second, "insufficient")
    over = {
        "status": {
            "conditions": [
                {
                    "type": "Complete",
                    "status": "True",
                    "reason": "Done",
                    "message": "all steps",
                    "lastTransitionTime": "2027-01-01T00:00:00Z",
                }
            ]
        }
    }
    place = ("-n", queue.namespace, "patch", "tbajob", "first", "--subresource=status", "--type=merge")
    kubectl(*place, "-p", json.dumps(over))
    ended = parse_job(queue.read("tbajob", "first", queue.namespace))
    assert not queue.settle(ended, pods_left=True)
    assert queue.settle(ended)
    queue.reaches(second, "Admitted")


def test_a_deleted_workload_lets_the_next_one_in(queue, kubectl):
    first, second = queue.job("first"), queue.job("second")
    queue.submit(first)
    queue.reaches(first, "Admitted")
    queue.submit(second)
    queue.stays_waiting(second, "insufficient")
    kubectl("-n", queue.namespace, "delete", "workload", "first-tba", "--timeout=30s")
    queue.reaches(second, "Admitted")


def test_readiness_is_written_once(queue):
    job = queue.job("one")
    queue.submit(job)
    queue.reaches(job, "Admitted")
    assert queue.settle(job, pods_left=True, ready=True)
    assert not queue.settle(job, pods_left=True, ready=True)


def test_children_stay_out_of_a_default_queue(queue, kubectl):
    """Kueue puts a plain Job into a LocalQueue called `default`; ours it leaves alone, thanks to externalFrameworks."""
    queue.apply(made("LocalQueue", "default", {"clusterQueue": queue.name}, queue.namespace))
    job = queue.job("one")
    queue.submit(job)
    queue.reaches(job, "Admitted")
    trainer = manifests.trainer_job(job, IMAGES, 1)
    searcher = manifests.searcher_set(job, IMAGES, 1)
    plain = {**trainer, "metadata": {"name": "plain", "namespace": queue.namespace}}
    until("Kueue knows the queue", lambda: applied(queue, plain)["spec"]["suspend"], seconds=30)
    assert not applied(queue, trainer)["spec"].get("suspend")
    stored = applied(queue, searcher)
    assert "kueue.x-k8s.io/queue-name" not in stored["metadata"]["labels"]
    queue.apply(
        {**searcher, "spec": {**searcher["spec"], "replicas": 3}}
    )  # Kueue refuses this on StatefulSets of its own
    assert queue.read("statefulset", stored["metadata"]["name"], queue.namespace)["spec"]["replicas"] == 3


def test_the_example_gives_searchers_spot_nodes_and_the_trainer_others(controller, kubectl, namespace):
    files = [ROOT / "examples/kueue" / name for name in ("queues.yaml", "job.yaml")]
    objects = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    for one in objects:
        if "namespace" in one["metadata"]:
            one["metadata"]["namespace"] = namespace
    queue = Queue(kubectl, namespace, "gpus")
    for one in objects:
        queue.apply(one)
    job = parse_job(queue.read("tbajob", "queued", namespace))
    queue.submit(job, kueue.wanted_searchers(job))
    found = queue.reaches(job, "Admitted")
    assert found.trainer is not None
    assert found.searcher is not None
    assert found.trainer.node_selector == {"karpenter.sh/capacity-type": "on-demand"}
    assert found.searcher.node_selector == {"karpenter.sh/capacity-type": "spot"}
    assert found.searcher_count == 8
    assert queue.workload(job)["spec"]["priority"] == 100
    queue.remove()
    kubectl("delete", "resourceflavors", "spot", "on-demand", "--timeout=30s")


def applied(queue: Queue, manifest: dict[str, Any]) -> dict[str, Any]:
    """A fresh object as the API server holds it."""
    ref = ref_of(manifest)
    place = ("-n", queue.namespace)
    queue.kubectl(*place, "delete", ref.kind, ref.name, "--ignore-not-found", "--cascade=background", "--wait=true")
    queue.kubectl(*place, "create", "-f", "-", input=json.dumps(manifest))
    return queue.read(ref.kind, ref.name, queue.namespace)
