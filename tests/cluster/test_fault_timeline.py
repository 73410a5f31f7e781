"""A run that a cluster does everything to, and whose conditions must tell the truth. Prints the timeline."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from support import cluster_faults as faults
from support.audit import audit
from support.kube_cluster import ClusterError, until
from support.tba_stack import OPERATOR_NAMESPACE, Stack, condition, example, progress, ready

TRUTH_SECONDS = 15.0
STEPS = 800
NAME = "arithmetic"


@dataclass
class Witness:
    """Compares conditions with the pods themselves, twice a second, and keeps the longest disagreement."""

    stack: Stack
    namespace: str
    start: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)
    excused: bool = False
    """The operator or the API server is away by intent: nobody can tell the truth."""
    _since: dict[str, float] = field(default_factory=dict)
    _last: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)

    def say(self, text: str) -> None:
        """A line of the timeline."""
        self.lines.append(f"{time.monotonic() - self.start:7.1f} s  {text}")
        print(self.lines[-1], flush=True)

    def watch(self) -> None:
        """Until `stop`."""
        while not self._stop.wait(0.5):
            try:
                self._look()
            except (ClusterError, KeyError):
                self._since.clear()

    def stop(self) -> None:
        """End the watching."""
        self._stop.set()

    @contextmanager
    def excuse(self, what: str) -> Iterator[None]:
        """While nobody can tell the truth."""
        self.excused = True
        self.say(what)
        try:
            yield
        finally:
            self._since.clear()
            self.excused = False
            self.say(f"{what}: over")

    def _look(self) -> None:
        job = self.stack.job(self.namespace, NAME)
        trainers = [p for p in self.stack.pods(self.namespace, "trainer") if ready(p)]
        searchers = [p for p in self.stack.pods(self.namespace, "searcher") if ready(p)]
        told = {kind: condition(job, kind).get("status") for kind in ("TrainerReady", "SearchersReady", "Degraded")}
        state = (
            f"step {progress(job).get('step', 0)}  trainer {len(trainers)} {told['TrainerReady']}  "
            f"searchers {len(searchers)}/{job['status']['searcher']['desiredReplicas']} {told['SearchersReady']}  "
            f"Degraded {told['Degraded']} {condition(job, 'Degraded').get('reason', '')}"
        )
        if state.split("  ", 1)[1] != self._last:
            self._last = state.split("  ", 1)[1]
            self.say(f"  {state}")
        if condition(job, "Complete").get("status") == "True":
            return
        desired = job["spec"]["searcher"]["replicas"]
        truth = {
            "TrainerReady": "True" if trainers else "False",
            "SearchersReady": "True" if desired and searchers else "False",
        }
        for kind, true in truth.items():
            wrong = told[kind] != true and not self.excused
            began = self._since.setdefault(kind, time.monotonic()) if wrong else self._since.pop(kind, time.monotonic())
            if wrong:
                self.longest[kind] = max(self.longest.get(kind, 0.0), time.monotonic() - began)


@dataclass(frozen=True)
class Run:
    """The job under fault, and what is done to it; each step returns when the run is whole again and goes on."""

    stack: Stack
    namespace: str
    witness: Witness

    def ready_trainers(self) -> list[dict]:
        """Trainer pods that are ready."""
        return [p for p in self.stack.pods(self.namespace, "trainer") if ready(p)]

    def scale(self, count: int) -> None:
        """kubectl scale."""
        self.witness.say(f"kubectl scale --replicas={count}")
        self.stack.cluster.kubectl("-n", self.namespace, "scale", f"tbajob/{NAME}", f"--replicas={count}")
        self.wait_searchers(count)

    def wait_searchers(self, count: int) -> None:
        """Just so many searcher pods, all ready."""

        def probe() -> bool:
            pods = self.stack.pods(self.namespace, "searcher")
            return len(pods) == count and all(ready(p) for p in pods)

        until(f"{count} searchers", probe, seconds=150)

    def goes_on(self) -> None:
        """Five more steps."""
        before = progress(self.stack.job(self.namespace, NAME)).get("step", 0)
        self.stack.wait_step(self.namespace, NAME, before + 5, seconds=180)

    def patch(self, spec: dict) -> None:
        """kubectl patch."""
        body = json.dumps({"spec": spec})
        self.stack.cluster.kubectl("-n", self.namespace, "patch", "tbajob", NAME, "--type=merge", "-p", body)

    def delete_trainer(self) -> None:
        """It writes a checkpoint and is replaced."""
        self.witness.say("kubectl delete pod: the trainer")
        old = self.ready_trainers()[0]["metadata"]["uid"]
        selector = ("-l", "tba.dev/role=trainer", "--wait=false")
        self.stack.cluster.kubectl("-n", self.namespace, "delete", "pod", *selector)
        until("another trainer", lambda: any(p["metadata"]["uid"] != old for p in self.ready_trainers()), seconds=180)
        self.goes_on()

    def delete_searchers(self) -> None:
        """All at once."""
        self.witness.say("kubectl delete pod: all searchers")
        old = {p["metadata"]["uid"] for p in self.stack.pods(self.namespace, "searcher")}
        selector = ("-l", "tba.dev/role=searcher", "--wait=false")
        self.stack.cluster.kubectl("-n", self.namespace, "delete", "pod", *selector)

        def replaced() -> bool:
            return not old & {p["metadata"]["uid"] for p in self.stack.pods(self.namespace, "searcher")}

        until("the old searchers are gone", replaced, seconds=90)
        self.wait_searchers(2)

    def kill_node_daemons(self) -> None:
        """Pods run on without them."""
        cluster = self.stack.cluster
        for node in ("node1", "node2"):
            self.witness.say(f"kill -9 kubelet and containerd of {node}")
            faults.kill_kubelet(cluster, node)
            faults.kill_containerd(cluster, node)
        for node in ("node1", "node2"):
            faults.wait_ready(cluster, node)
        self.goes_on()

    def restart_apiserver(self) -> None:
        """The operator's watches begin anew."""
        with self.witness.excuse("kill -9 kube-apiserver, start it again"):
            faults.restart_apiserver(self.stack.cluster)
            until("the job can be read", lambda: self.stack.job(self.namespace, NAME), seconds=60)
        self.goes_on()

    def stop_operator(self) -> None:
        """The run needs no operator."""
        operator = ("deployment", "-l", "app.kubernetes.io/name=tba-operator")
        cluster = self.stack.cluster
        with self.witness.excuse("operator away for a minute; meanwhile a searcher is deleted"):
            cluster.kubectl("-n", OPERATOR_NAMESPACE, "scale", *operator, "--replicas=0")
            cluster.kubectl("-n", self.namespace, "delete", "pod", f"{NAME}-searcher-0", "--wait=false")
            time.sleep(60)
            cluster.kubectl("-n", OPERATOR_NAMESPACE, "scale", *operator, "--replicas=1")
            cluster.kubectl("-n", OPERATOR_NAMESPACE, "rollout", "status", *operator, "--timeout=90s")
        self.goes_on()

    def drain(self) -> None:
        """The node of the trainer."""
        node = self.ready_trainers()[0]["spec"]["nodeName"]
        self.witness.say(f"kubectl drain {node}, where the trainer is")
        faults.drain(self.stack.cluster, node)
        until(
            "the trainer elsewhere",
            lambda: any(p["spec"]["nodeName"] != node for p in self.ready_trainers()),
            seconds=180,
        )
        faults.uncordon(self.stack.cluster, node)
        self.wait_searchers(2)
        self.goes_on()

    def finish(self) -> None:
        """Without searchers and without a replay limit the trainer ends on what it has ingested."""
        reached = progress(self.stack.job(self.namespace, NAME))["step"]
        assert reached < STEPS, "the run was over too early: raise STEPS"
        self.scale(0)
        self.witness.say("maxReplayRatio lifted: the trainer ends on what it has")
        self.patch({"buffer": {"maxReplayRatio": 100000}})
        self.stack.wait_condition(self.namespace, NAME, "Complete", seconds=600)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_run_survives_what_a_cluster_does_and_its_conditions_tell_the_truth(stack, base, namespace):
    stack.secret(namespace)
    manifest = example()
    spec = manifest["spec"]
    spec["objective"] |= {"totalSteps": STEPS, "learningRate": 1e-6}
    spec["storage"] |= {"uri": f"s3://tba/runs/{namespace}", "checkpoints": {"everySteps": 20}}
    spec["searcher"]["replicas"] = 1
    del spec["task"]["evaluation"]  # the last one would wait for searchers, and there will be none
    spec["trainer"] = {**spec.get("trainer", {}), "terminationGracePeriodSeconds": 60}
    stack.apply(namespace, manifest)
    with watching(Witness(stack, namespace)) as witness:
        run = Run(stack, namespace, witness)
        stack.wait_step(namespace, NAME, 10, seconds=240)
        for count in (3, 0, 2):
            run.scale(count)
        run.goes_on()
        run.delete_trainer()
        run.delete_searchers()
        run.kill_node_daemons()
        run.restart_apiserver()
        run.stop_operator()
        run.drain()
        run.finish()
    with stack.store(spec["storage"]["uri"]) as store:
        result = audit(store)
    witness.say(f"{sum(result.in_bucket.values())} rows uploaded, {sum(result.ingested.values())} ingested")
    witness.say(f"longest untruth, seconds: {witness.longest}")
    assert result.lost == set() and result.doubled == set()
    assert all(seconds <= TRUTH_SECONDS for seconds in witness.longest.values()), witness.longest


@contextmanager
def watching(witness: Witness) -> Iterator[Witness]:
    """The witness looks from a thread of its own."""
    thread = threading.Thread(target=witness.watch, daemon=True)
    thread.start()
    try:
        yield witness
    finally:
        witness.stop()
        thread.join()
