"""The controller as a process of this host against a real API server. Pods never get a node: tests play the kubelet."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.jobs import smallest
from support.kube_cluster import ClusterError, KubeCluster, until

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "tbajobs.tba.dev.yaml"
KINDS = "tbajobs,configmaps,services,serviceaccounts,networkpolicies,poddisruptionbudgets,jobs,statefulsets"
WRITE = re.compile(r'^tba_api_requests_total\{kind="(?!Lease)\w+",outcome="ok",verb="(?!get|list|discover)\w+"\} (\d+)')
# The end of a namespace waits for half of the longest grace period of its pods, whether or not they have a node.
NOWHERE = {
    "podTemplate": {"spec": {"nodeSelector": {"tba.dev/nowhere": "true"}}},
    "terminationGracePeriodSeconds": 1,
}


class Operator:
    """One replica."""

    def __init__(self, cluster: KubeCluster, namespace: str, log: Path, **settings: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        environment = {
            "KUBECONFIG": str(cluster.kubeconfig),
            "PYTHONPATH": f"{ROOT}/workloads:{ROOT}/operator",
            "TBA_NAMESPACE": namespace,
            "TBA_WATCH_NAMESPACES": namespace,
            "TBA_TRAINER_IMAGE": "trainer:1",
            "TBA_SEARCHER_IMAGE": "searcher:1",
            "TBA_HTTP_PORT": str(self.port),
            "TBA_IDENTITY": log.stem,
            "TBA_RESYNC_SECONDS": "1",
        }
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tba_operator"], env={**os.environ, **environment, **settings}, stderr=file
            )

    def ask(self, path: str) -> str:
        """An answer of its HTTP server; empty before there is one."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    @property
    def leads(self) -> bool:
        return self.ask("/readyz").strip() == "leading"

    @property
    def writes(self) -> int:
        """Requests that may change something, Leases aside."""
        return sum(int(found[1]) for line in self.ask("/metrics").splitlines() if (found := WRITE.match(line)))

    @property
    def passes(self) -> int:
        found = re.search(r"^tba_reconcile_seconds_count (\d+)", self.ask("/metrics"), re.MULTILINE)
        return int(found[1]) if found else 0

    def work_on(self, passes: int = 3) -> None:
        """Wait for some more passes."""
        before = self.passes
        until(f"{passes} passes of {self.log.stem}", lambda: self.passes >= before + passes)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(15)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log lines of that name."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]


@pytest.fixture(scope="module")
def crd(cluster):
    """Gone afterwards, unless it was there: Helm takes over no CRD that it has not made."""
    was_there = "tbajobs" in cluster.kubectl("get", "crd", "-o", "name")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    until("the CRD is served", lambda: cluster.kubectl("get", "tbajobs", "-A") is not None, seconds=30)
    yield
    if not was_there:
        cluster.kubectl("delete", "crd", "tbajobs.tba.dev", "--timeout=60s")


@pytest.fixture
def start(cluster, crd, namespace, tmp_path):
    """Starts replicas; ends those that still run."""
    started: list[Operator] = []

    def one(name: str = "operator", **settings: str) -> Operator:
        started.append(Operator(cluster, namespace, tmp_path / f"{name}.log", **settings))
        return started[-1]

    yield one
    for operator in started:
        operator.process.kill()
        operator.process.wait()


@pytest.fixture
def world(cluster, namespace):
    return World(cluster, namespace)


class World:
    """The namespace of a test."""

    def __init__(self, cluster: KubeCluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def create(self, name="gsm8k", replicas=2, **spec):
        """A job whose pods no node takes."""
        roles = {"trainer": NOWHERE, "searcher": NOWHERE | {"replicas": replicas}}
        job = smallest(**(roles | spec))
        job["metadata"]["name"] = name
        self.cluster.apply(job, namespace=self.namespace)

    def get(self, *args):
        return self.cluster.get("-n", self.namespace, *args)

    def status(self, name="gsm8k"):
        return self.get("tbajob", name).get("status", {})

    def condition(self, kind, name="gsm8k"):
        found = [c for c in self.status(name).get("conditions", []) if c["type"] == kind]
        return (found[0]["status"], found[0]["reason"]) if found else None

    def versions(self):
        """kind/name -> (uid, resourceVersion) of the job and all its children."""
        items = self.get(KINDS, "-l", "tba.dev/job-name")["items"] + self.get("tbajobs")["items"]
        of = [(item, item["metadata"]) for item in items]
        return {f"{item['kind']}/{meta['name']}": (meta["uid"], meta["resourceVersion"]) for item, meta in of}

    def pods(self, role):
        found = self.get("pods", "-l", f"tba.dev/role={role}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def play_kubelet(self, pod, container, phase="Running", ready=True):
        """Report a pod's state as a kubelet would."""
        name = pod["metadata"]["name"]
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        said = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": at}
        status = {
            "phase": phase,
            "podIP": "10.255.255.1",
            "podIPs": [{"ip": "10.255.255.1"}],
            "conditions": [said],
            "containerStatuses": [
                {
                    "name": pod["spec"]["containers"][0]["name"],
                    "image": "i",
                    "imageID": "i",
                    "restartCount": 0,
                    "ready": ready,
                    "state": container,
                }
            ],
        }
        patch = json.dumps({"status": status})
        self.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)

    def run_all(self, searchers=2):
        """Every pod becomes ready."""
        at = {"running": {"startedAt": "2027-01-15T08:00:00Z"}}
        for role, count in (("trainer", 1), ("searcher", searchers)):
            pods = until(f"{count} {role} pods", lambda r=role, n=count: len(self.pods(r)) == n and self.pods(r))
            for pod in pods:
                self.play_kubelet(pod, at)

    def kubectl(self, *args):
        return self.cluster.kubectl("-n", self.namespace, *args)


def test_a_job_gets_its_children_then_nothing_is_written_until_something_changes(start, world):
    operator = start()
    world.create()
    until("a trainer pod named in status", lambda: world.status().get("trainer", {}).get("podName"))
    world.run_all()
    until("all ready", lambda: world.condition("SearchersReady") == ("True", "Ready"))
    assert world.status()["phase"] == "Running"
    assert world.condition("TrainerReady") == ("True", "Ready")
    assert world.status()["searcher"]["readyReplicas"] == 2
    operator.work_on()
    before, writes = world.versions(), operator.writes
    assert len(before) == 11
    operator.work_on(5)
    assert world.versions() == before
    assert operator.writes == writes
    assert operator.events("reconcile_failed") == []


def test_the_watch_library_leaves_nothing_on_any_object(start, world):
    start()
    world.create()
    until("pods", lambda: world.pods("trainer") and len(world.pods("searcher")) == 2)
    everything = world.kubectl("get", f"{KINDS},pods", "-o", "yaml", "--show-managed-fields")
    assert "kopf" not in everything
    assert "finalizers" not in json.dumps(world.get("tbajob", "gsm8k")["metadata"])


def test_a_deleted_child_comes_back_and_a_changed_one_is_corrected(start, world):
    start()
    world.create()
    until("children", lambda: world.condition("TrainerReady"))
    world.kubectl("delete", "networkpolicy", "gsm8k-trainer")
    world.kubectl("patch", "service", "gsm8k-trainer", "--type=merge", "-p", '{"spec":{"selector":{"a":"b"}}}')
    until("the policy", lambda: world.get("networkpolicy", "gsm8k-trainer"))
    want = {"tba.dev/job-name": "gsm8k", "tba.dev/role": "trainer"}
    selector = until(
        "the selector",
        lambda: (s := world.get("service", "gsm8k-trainer")["spec"]["selector"]).items() >= want.items() and s,
    )
    assert selector["tba.dev/role"] == "trainer"


def test_scale_and_suspend_are_followed_within_a_second(start, world):
    start()
    world.create()
    until("searchers", lambda: len(world.pods("searcher")) == 2)
    world.kubectl("scale", "tbajob", "gsm8k", "--replicas=3")
    until("three searchers", lambda: world.get("statefulset", "gsm8k-searcher")["spec"]["replicas"] == 3, seconds=5)
    world.kubectl("patch", "tbajob", "gsm8k", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    until("no pods", lambda: not world.pods("trainer") and not world.pods("searcher"))
    until("suspended", lambda: world.condition("Suspended") == ("True", "Suspended"))
    world.kubectl("patch", "tbajob", "gsm8k", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    until("a new attempt", lambda: world.status()["trainer"]["attempt"] == 2)
    until("its pod", lambda: len(world.pods("trainer")) == 1)
    assert [j["metadata"]["name"] for j in world.get("jobs")["items"]] == ["gsm8k-trainer-2"]


def test_a_finished_trainer_ends_the_job(start, world):
    start()
    world.create()
    world.run_all()
    [pod] = world.pods("trainer")
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": "2027-01-15T08:00:00Z"}
    world.play_kubelet(pod, {"terminated": ended | {"finishedAt": "2027-01-15T09:00:00Z"}}, "Succeeded", ready=False)
    until("complete", lambda: world.condition("Complete") == ("True", "Completed"))
    until("no searchers", lambda: world.get("statefulset", "gsm8k-searcher")["spec"]["replicas"] == 0)
    assert world.status()["phase"] == "Complete"


def test_a_restarted_operator_catches_up_and_writes_nothing_else(start, world):
    first = start("first")
    world.create()
    world.run_all()
    until("all ready", lambda: world.condition("SearchersReady") == ("True", "Ready"))
    first.work_on()
    started = time.monotonic()
    assert first.stop() == 0
    assert time.monotonic() - started < 10
    assert world.get("lease", "tba-operator")["spec"]["holderIdentity"] == ""
    before = world.versions()
    second = start("second")
    until("the second leads", lambda: second.leads)
    second.work_on()
    assert world.versions() == before
    assert second.writes == 0
    assert second.stop() == 0
    world.kubectl("scale", "tbajob", "gsm8k", "--replicas=1")
    start("third")
    until("caught up", lambda: world.get("statefulset", "gsm8k-searcher")["spec"]["replicas"] == 1)


def test_of_two_replicas_one_writes_and_the_other_takes_over_when_it_is_killed(start, world):
    a, b = start("a"), start("b")
    leader = until("a leader", lambda: next((o for o in (a, b) if o.leads), None))
    standby = b if leader is a else a
    world.create()
    until("children", lambda: world.status().get("trainer", {}).get("podName"))
    until("the standby answers", lambda: standby.ask("/readyz").strip() == "standby")
    leader.work_on()
    assert standby.writes == 0
    before = world.versions()
    leader.stop(signal.SIGKILL)
    until("the other leads", lambda: standby.leads, seconds=30)
    standby.work_on()
    assert world.versions() == before
    assert standby.writes == 0
    world.create("another", replicas=1)
    until("it works", lambda: world.condition("TrainerReady", "another"))


def test_an_operator_that_lost_its_lease_ends_at_once(start, world):
    operator = start()
    until("it leads", lambda: operator.leads)
    spec = {"holderIdentity": "somebody else", "leaseDurationSeconds": 60}
    world.kubectl("patch", "lease", "tba-operator", "--type=merge", "-p", json.dumps({"spec": spec}))
    assert operator.process.wait(15) == 1
    assert len(operator.events("lease_lost")) == 1


def test_an_operator_that_waits_for_the_lease_stops_at_once_too(start, world):
    first = start("first")
    until("it leads", lambda: first.leads)
    second = start("second")
    until("it waits", lambda: second.ask("/readyz").strip() == "standby")
    started = time.monotonic()
    assert second.stop() == 0
    assert time.monotonic() - started < 5


@contextmanager
def paused(operator: Operator) -> Iterator[None]:
    """The process stands still."""
    operator.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        operator.process.send_signal(signal.SIGCONT)


def test_a_leader_that_stood_still_for_too_long_writes_no_more(start, world):
    a = start("a")
    until("a leads", lambda: a.leads)
    b = start("b")
    until("b waits", lambda: b.ask("/readyz").strip() == "standby")
    with paused(a):
        until("b leads", lambda: b.leads, seconds=30)
        world.create()
        until("b works", lambda: world.condition("TrainerReady"))
    assert a.process.wait(15) == 1
    assert a.events("job_reconciled") == []


def test_a_namespace_that_goes_away_takes_a_job_with_it(start, cluster, world, second_namespace):
    operator = start(TBA_WATCH_NAMESPACES=f"{world.namespace},{second_namespace}")
    World(cluster, second_namespace).create()
    other = World(cluster, second_namespace)
    until("children", lambda: other.condition("TrainerReady"))
    cluster.kubectl("delete", "namespace", second_namespace, "--wait", "--timeout=60s")
    cluster.kubectl("create", "namespace", second_namespace)  # the fixture ends it
    with suppress(ClusterError):
        until("something went wrong", lambda: operator.events("reconcile_failed"), seconds=2)
    assert [line["error"] for line in operator.events("reconcile_failed")] == []
