"""One job on the test cluster, and its run in the bucket. Searchers make up their responses: there is nothing to learn.

Its batches are small and its searchers slow, so that a trainer and two searchers take half a core: about two steps a
second, which no machine must keep up with.
"""

import json
from dataclasses import dataclass
from typing import Any

from support.kube_cluster import ClusterError, until
from support.processes import merge
from support.tba_stack import Stack, condition, example, progress, ready

from tba.contracts.keys import LATEST, RUN, WEIGHTS, CheckpointKey, WeightsKey
from tba.contracts.records import CheckpointManifest, Latest, RunRecord

END_TOKEN = 12
"""Of the example's tokenizer."""
ENDLESS = 100_000
CHECKPOINT_STEPS = 10


@dataclass(frozen=True)
class ClusterRun:
    """A job by name and what is asked of it."""

    stack: Stack
    namespace: str
    name: str = "arithmetic"

    @property
    def uri(self) -> str:
        """Where its run lives."""
        return f"s3://tba/runs/{self.namespace}-{self.name}"

    def manifest(self, *, steps: int = ENDLESS, **changes: Any) -> dict[str, Any]:
        """The job; `changes` are merged into its spec."""
        made = example()
        del made["spec"]["task"]["evaluation"]
        del made["spec"]["buffer"]["maxPolicyLag"]
        lengths = {"distribution": "uniform", "low": 2, "high": 4}
        engine = {"vocabulary": END_TOKEN + 1, "eosToken": END_TOKEN, "lengths": lengths, "tokensPerSecond": 60}
        cheap = {
            "objective": {
                "promptsPerBatch": 4,
                "responsesPerPrompt": 4,
                "totalSteps": steps,
                "learningRate": 1e-6,
                "schedule": {"warmupSteps": 0},
            },
            "buffer": {"minInitialTrajectories": 24},
            "sync": {"intervalSteps": 2, "pollIntervalSeconds": 1.0},
            "storage": {"uri": self.uri, "checkpoints": {"everySteps": CHECKPOINT_STEPS}},
            "trainer": {"podTemplate": _probed_often("trainer")},
            "searcher": {
                "samplesPerPrompt": 6,
                "engine": {"type": "fake", "maxNumSeqs": 24, "extraArgs": engine},
                "podTemplate": _probed_often("searcher"),
            },
        }
        made["metadata"]["name"] = self.name
        made["spec"] = merge(merge(made["spec"], cheap), changes)
        return made

    def apply(self, *, labels: dict[str, str] | None = None, steps: int = ENDLESS, **changes: Any) -> None:
        """kubectl apply."""
        made = self.manifest(steps=steps, **changes)
        if labels:
            made["metadata"]["labels"] = labels
        self.stack.apply(self.namespace, made)

    def patch(self, **spec: Any) -> None:
        """kubectl patch of the spec."""
        self.kubectl("patch", "tbajob", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def kubectl(self, *args: str) -> str:
        """In the job's namespace."""
        return self.stack.cluster.kubectl("-n", self.namespace, *args)

    @property
    def job(self) -> dict[str, Any]:
        """The TBAJob."""
        return self.stack.job(self.namespace, self.name)

    def condition(self, kind: str) -> dict[str, Any]:
        """One of its conditions, or {}."""
        return condition(self.job, kind)

    def becomes(self, kind: str, status: str = "True", *, reason: str | None = None, seconds: float = 120) -> str:
        """The message of a condition, once it has that status and, if one is named, that reason."""

        def probe() -> dict[str, Any]:
            found = self.condition(kind)
            return found if found.get("status") == status and reason in (None, found["reason"]) else {}

        return until(f"{self.name}: {kind}={status} {reason or ''}", probe, seconds=seconds)["message"]

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        """Of this job."""
        selector = f"tba.dev/job-name={self.name}" + (f",tba.dev/role={role}" if role else "")
        return self.stack.cluster.get("-n", self.namespace, "pods", "-l", selector)["items"]

    def uids(self, role: str | None = None) -> set[str]:
        """Of its pods."""
        return {pod["metadata"]["uid"] for pod in self.pods(role)}

    def ready_pods(self, role: str) -> list[dict[str, Any]]:
        """Of its pods."""
        return [pod for pod in self.pods(role) if ready(pod)]

    def step(self) -> int:
        """What its status says."""
        return progress(self.job).get("step", 0)

    def reaches(self, step: int, *, seconds: float = 240) -> int:
        """Wait for a step in its status."""
        return self.stack.wait_step(self.namespace, self.name, step, seconds=seconds)

    def goes_on(self, steps: int = 4) -> None:
        """From where it is."""
        self.reaches(self.step() + steps)

    def delete(self) -> None:
        """kubectl delete; returns when nothing of it is left in the namespace."""
        self.kubectl("delete", "tbajob", self.name, "--timeout=60s")
        kinds = "pods,jobs,statefulsets,services,configmaps,serviceaccounts,networkpolicies,poddisruptionbudgets"
        selector = ("-l", f"tba.dev/job-name={self.name}", "-o", "name")
        until("its children are gone", lambda: not self.kubectl("get", kinds, *selector), seconds=120)

    def is_gone(self) -> bool:
        """Whether there is no such job."""
        try:
            return not self.job
        except ClusterError as error:
            return "NotFound" in str(error)

    # -- in the bucket

    def latest(self) -> Latest:
        """The head of its run."""
        with self.stack.store(self.uri) as store:
            return Latest.parse(store.get(LATEST).data)

    def record(self) -> RunRecord:
        """What made its run."""
        with self.stack.store(self.uri) as store:
            return RunRecord.model_validate_json(store.get(RUN).data)

    def checkpoint(self) -> CheckpointManifest:
        """The newest."""
        latest = self.latest()
        assert latest.checkpoint is not None, latest
        with self.stack.store(self.uri) as store:
            return CheckpointManifest.model_validate_json(store.get(latest.checkpoint).data)

    def resumed_at(self, epoch: int, *, seconds: float = 180) -> int:
        """The step at which a take-over began, once there is a checkpoint of it."""

        def probe() -> bool:
            key = self.latest().checkpoint
            return key is not None and CheckpointKey.parse(key).epoch >= epoch

        until(f"a checkpoint of epoch {epoch}", probe, seconds=seconds)
        return self.checkpoint().lineage.resume_steps[epoch]

    def versions(self) -> list[int]:
        """Of the snapshots in the bucket, ascending."""
        with self.stack.store(self.uri) as store:
            return sorted({WeightsKey.parse(info.key).version for info in store.list_after(WEIGHTS)})

    def objects(self) -> int:
        """How many there are."""
        with self.stack.store(self.uri) as store:
            return sum(1 for _ in store.list_after(""))


def _probed_often(container: str) -> dict[str, Any]:
    """A pod template. Up to 15 seconds of each start would pass between ready and seen."""
    startup = {"periodSeconds": 2, "failureThreshold": 300}
    often = {"name": container, "startupProbe": startup, "readinessProbe": {"periodSeconds": 2}}
    return {"spec": {"containers": [often]}}
