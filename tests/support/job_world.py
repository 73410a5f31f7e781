"""One TBAJob in a simulated cluster: API server, Job and StatefulSet controllers, kubelets; time passes by hand.

`World` carries out plans as apply.py does and ends pods as a test says. Only what plan.py looks at is simulated.
"""

import copy
import itertools
from dataclasses import dataclass, field, replace

from support.jobs import smallest

from tba.contracts.history import Progress
from tba.contracts.termination import Termination
from tba_operator import naming
from tba_operator.api import Job, parse_job, parse_status
from tba_operator.plan import plan
from tba_operator.world import ApplyError, Ended, Observed, Plan, Pod, ProgressSample, Ref, Settings, ref_of

START = 1_800_000_000.0
SETTINGS = Settings(trainer_image="registry/trainer:1", searcher_image="registry/searcher:1")
NAME, NAMESPACE = "gsm8k", "lab"
GRACE, ENDING = 30.0, 3.0
"""Seconds of grace of a deleted pod, and those that it takes of them."""
IGNORED_EXITS, FATAL_EXITS = (2, 143), (3, 64)
STATEFUL_SET = Ref("apps/v1", "StatefulSet", NAMESPACE, f"{NAME}-searcher")
CONFIG_MAP = Ref("v1", "ConfigMap", NAMESPACE, f"{NAME}-config")
BUDGET = Ref("policy/v1", "PodDisruptionBudget", NAMESPACE, f"{NAME}-searcher")
WORKLOAD_KIND = "Workload"


def job_ref(attempt):
    """Of a trainer Job."""
    return Ref("batch/v1", "Job", NAMESPACE, naming.trainer_job(NAME, attempt))


def said(pod_uid, *, step=5, state="Training", **changes):
    """An answer of /progress."""
    fields = {
        "run_id": "run-1",
        "pod_uid": pod_uid,
        "state": state,
        "epoch": 1,
        "step": step,
        "total_steps": 700,
        "percentage": 100 * step / 700,
        "policy_version": step,
        "reward": 0.123456,
        "eval_score": None,
        "staleness_mean": 1.23456,
        "trainer_idle_percent": 12.345,
        "trajectories": 1000,
        "replay_ratio": 0.98765,
        "eta_seconds": 1234.5,
        "searchers": 3,
        "last_updated_time": START + step,
    }
    return Progress(**(fields | changes))


@dataclass
class World:
    """A cluster with one job in it."""

    manifest: dict
    now: float = START
    settings: Settings = SETTINGS
    objects: dict = field(default_factory=dict)
    pods: dict = field(default_factory=dict)
    """uid -> Pod."""
    owners: dict = field(default_factory=dict)
    """uid of a pod -> uid of its Job or StatefulSet."""
    counted: set = field(default_factory=set)
    """Pods whose end their Job has seen."""
    truly_failed: int = 0
    """Ends that should count, whoever saw them."""
    sick_nodes: set = field(default_factory=set)
    errors: dict = field(default_factory=dict)
    refusing: dict = field(default_factory=dict)
    """Ref -> ApplyError of the API server."""
    create_failures: tuple = ()
    progress: ProgressSample | None = None
    scaling: object = None
    kueue: bool = False
    flavors: dict = field(default_factory=dict)
    """ResourceFlavors by name."""
    gone: bool = False
    events: list = field(default_factory=list)
    ids: itertools.count = field(default_factory=lambda: itertools.count(1))
    _parsed: Job | None = None

    @staticmethod
    def of(labels=None, **spec):
        """A world with the smallest job, its spec's sections replaced."""
        manifest = smallest(**spec)
        manifest["metadata"] |= {
            "namespace": NAMESPACE,
            "uid": "job-uid",
            "generation": 1,
            "creationTimestamp": "2027-01-15T08:00:00Z",
            "labels": labels or {},
        }
        return World(manifest)

    # -- what is there

    @property
    def job(self):
        """The TBAJob as read; its spec is read anew when it changed."""
        metadata, raw_status = self.manifest["metadata"], self.manifest.get("status") or {}
        if self._parsed is None or self._parsed.generation != metadata["generation"]:
            self._parsed = parse_job(self.manifest)
        return replace(self._parsed, status=parse_status(raw_status), raw_status=raw_status)

    @property
    def status(self):
        """Of the TBAJob."""
        return parse_status(self.manifest.get("status") or {})

    def condition(self, kind):
        """(status, reason) of a condition."""
        found = self.status.condition(kind)
        return (found.status, found.reason)

    def message(self, kind):
        """Of a condition."""
        return self.status.condition(kind).message

    @property
    def phase(self):
        """Of the TBAJob."""
        return self.status.phase

    def jobs(self):
        """Numbers of the trainer Jobs."""
        return sorted(
            int(o["metadata"]["labels"]["tba.dev/attempt"]) for r, o in self.objects.items() if r.kind == "Job"
        )

    def of_role(self, role):
        """Pods of a role that are not over, oldest first."""
        return [p for p in self.pods.values() if p.role == role and not p.over]

    @property
    def trainer(self):
        """Rank 0's pod that runs or may run, of which there is one."""
        return self.node(0)

    def node(self, rank):
        """The one pod of a node rank of the trainer that runs or may run."""
        (pod,) = (pod for pod in self.of_role("trainer") if pod.node_rank == rank)
        return pod

    def living_trainers(self):
        """Trainer pods that may do something: not over, and not on a node that is dead."""
        return [p for p in self.of_role("trainer") if p.node not in self.sick_nodes]

    def observed(self, *, children=None, pods=None):
        """What a reconcile sees; of an older moment where given."""
        asked = {p.node for p in self.pods.values() if p.deletion_deadline and p.deletion_deadline < self.now}
        return Observed(
            children=dict(self.objects) if children is None else children,
            pods=tuple(self.pods.values()) if pods is None else pods,
            progress=self.progress,
            not_ready_nodes=frozenset(self.sick_nodes & asked),
            create_failures=self.create_failures,
            kueue=self.kueue,
            errors=dict(self.errors),
            scaling=self.scaling,
            flavors=dict(self.flavors),
        )

    # -- the controller

    def plan(self, **older):
        """What the controller would do now."""
        return plan(self.job, self.observed(**older), self.now, self.settings)

    def reconcile(self, *, crash_after=None, **older) -> Plan:
        """One pass. `crash_after`: only so many of its writes are made, and nothing is remembered."""
        job = self.job
        observed = self.observed(**older)
        wanted = plan(job, observed, self.now, self.settings)
        steps = [
            *((self._apply, m) for m in wanted.apply),
            *((self._scale, s) for s in wanted.scale),
            *((self._delete, d) for d in wanted.delete),
        ]
        for write, what in steps[:crash_after]:
            write(what)
        if crash_after is not None and crash_after <= len(steps):
            self.scaling = None
            return wanted
        if self.errors != observed.errors:
            wanted = plan(job, replace(observed, errors=dict(self.errors)), self.now, self.settings)
        if wanted.status is not None:
            self.manifest["status"] = wanted.status.dump()
        self.events += [(note.reason, note.message) for note in wanted.notes]
        self.scaling = wanted.scaling
        self.gone = self.gone or wanted.delete_job
        return wanted

    def settle(self, *, rounds=40):
        """Controllers and kubelets at work until nobody has anything to do; pods start, none ends by itself."""
        for _ in range(rounds):
            before = self._state()
            self.reconcile()
            self.controllers()
            self.kubelets()
            ending = [p for p in self.pods.values() if p.deletion_deadline and p.node not in self.sick_nodes]
            if before == self._state() and not ending:
                return self
            self.pass_time(1)
        raise AssertionError(f"still busy: {self.plan()}")

    def _state(self):
        objects = {
            ref: (found["metadata"]["uid"], found["metadata"]["generation"], (found.get("spec") or {}).get("replicas"))
            + (str(found.get("status")),)
            for ref, found in self.objects.items()
        }
        return objects, dict(self.pods), self.manifest.get("status")

    def is_quiet(self):
        """Whether a pass would write nothing."""
        found = self.plan()
        return not (found.apply or found.scale or found.delete or found.status or found.notes or found.replace_status)

    # -- the user

    def change(self, section, **values):
        """Change fields of a section of the spec, or with section null of the spec itself."""
        target = self.manifest["spec"] if section is None else self.manifest["spec"].setdefault(section, {})
        target.update(values)
        self.manifest["metadata"]["generation"] += 1
        self.errors = {}

    def pass_time(self, seconds):
        """Nothing happens meanwhile."""
        self.now += seconds

    def remove_job(self, attempt):
        """kubectl delete job."""
        del self.objects[job_ref(attempt)]

    # -- the API server

    def _apply(self, manifest):
        ref = ref_of(manifest)
        if ref in self.refusing:
            self.errors[ref] = self.refusing[ref]
            return
        found = self.objects.get(ref)
        if found is None:
            stored = copy.deepcopy(manifest)
            stored["metadata"] |= {"uid": f"{ref.kind}-{next(self.ids)}", "generation": 1}
            self.objects[ref] = stored
            return
        if ref.kind == "Job" and found["metadata"]["annotations"] != manifest["metadata"]["annotations"]:
            self.errors[ref] = ApplyError("InvalidPodTemplate", "field is immutable")
            return
        found["metadata"] |= copy.deepcopy({k: v for k, v in manifest["metadata"].items()})
        for part in ("spec", "data", "imagePullSecrets"):
            if part in manifest and found.get(part) != manifest[part]:
                found[part] = copy.deepcopy(manifest[part])
                found["metadata"]["generation"] += 1

    def _scale(self, scale):
        self.objects[scale.ref]["spec"]["replicas"] = scale.replicas

    def _delete(self, delete):
        if delete.ref.kind == "Pod":
            if delete.uid in self.pods:
                self._remove_pod(delete.uid)
        elif delete.ref in self.objects and self.objects[delete.ref]["metadata"]["uid"] == delete.uid:
            del self.objects[delete.ref]

    # -- controllers

    def controllers(self):
        """One round of Job controller, StatefulSet controller and garbage collector."""
        for ref, found in list(self.objects.items()):
            if ref.kind == "Job":
                self._sync_job(ref, found)
            elif ref.kind == "StatefulSet":
                self._sync_stateful_set(found)
        alive = {found["metadata"]["uid"] for found in self.objects.values()}
        for uid in [uid for uid, owner in self.owners.items() if owner not in alive]:
            self.delete_pod(uid)

    def _sync_job(self, ref, found):
        uid, status = found["metadata"]["uid"], found.setdefault("status", {})
        own = [pod for pod in self.pods.values() if self.owners[pod.uid] == uid]
        for pod in own:
            if pod.over and pod.uid not in self.counted:
                self.counted.add(pod.uid)
                self._count(status, pod)
        attempt = int(found["metadata"]["labels"]["tba.dev/attempt"])
        for rank in range(found["spec"]["completions"]):
            mine = [pod for pod in own if pod.node_rank == rank]
            if status.get("conditions") or any(not pod.over or pod.phase == "Succeeded" for pod in mine):
                continue
            self.add_pod("trainer", f"{ref.name}-{rank}-{next(self.ids)}", owner=uid, attempt=attempt, node_rank=rank)
        if status.get("conditions"):  # of several pods those that are left are ended
            for pod in own:
                if not pod.over:
                    self.delete_pod(pod.uid)

    def _count(self, status, pod):
        code = pod.ended.exit_code if pod.ended else -1
        if code == 0 and pod.node_rank != 0:
            return
        if code == 0:
            status.update(
                succeeded=1, conditions=[{"type": "Complete", "status": "True", "reason": "CompletionsReached"}]
            )
            return
        if pod.disrupted or code in IGNORED_EXITS:
            return
        status["failed"] = status.get("failed", 0) + 1
        self.truly_failed += 1
        if code in FATAL_EXITS:
            message = (
                f"Container trainer for pod {NAMESPACE}/{pod.name} failed with exit code {code} matching FailJob rule"
            )
            status["conditions"] = [
                {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": message}
            ]

    def _sync_stateful_set(self, found):
        uid, wanted, status = found["metadata"]["uid"], found["spec"]["replicas"], found.setdefault("status", {})
        revision = found["metadata"]["annotations"]["tba.dev/inputs-hash"][:8]
        own = {pod.name: pod for pod in self.pods.values() if self.owners[pod.uid] == uid}
        names = [f"{NAME}-searcher-{i}" for i in range(wanted)]
        for name in own.keys() - set(names):
            self.delete_pod(own[name].uid)
        stale = [own[n] for n in reversed(names) if n in own and own[n].revision != revision]
        broken = [pod for pod in stale if not pod.ready]
        if stale and (broken or all(n in own and own[n].ready for n in names)):
            self.delete_pod((broken or stale)[0].uid)
        for name in names:
            if name not in own:
                self.add_pod("searcher", name, owner=uid, revision=revision)
        mine = [pod for pod in self.pods.values() if self.owners[pod.uid] == uid]
        status.setdefault("currentRevision", revision)
        status["updateRevision"] = revision
        if all(pod.revision == revision for pod in mine):
            status["currentRevision"] = revision
        status["replicas"] = len(mine)
        status["readyReplicas"] = sum(1 for pod in mine if pod.ready)
        status["updatedReplicas"] = sum(1 for pod in mine if pod.revision == revision)

    # -- kubelets

    def add_pod(self, role, name, *, owner, attempt=None, revision=None, node_rank=0):
        """A pod that no node has taken yet."""
        uid = f"pod-{next(self.ids)}"
        self.owners[uid] = owner
        self.pods[uid] = Pod(
            name, uid, role, attempt, "Pending", False, self.now, revision=revision, node_rank=node_rank
        )

    def kubelets(self):
        """Pods run and are ready, and those that are being deleted end, but on sick nodes."""
        for pod in list(self.pods.values()):
            if pod.node in self.sick_nodes:
                continue
            if pod.deletion_deadline is not None:
                if self.now >= pod.deletion_deadline - GRACE + ENDING:
                    self._finish(pod)
            elif pod.phase == "Pending" and pod.waiting_reason is None and pod.unschedulable is None:
                self.set(pod, phase="Running", ready=True, node=pod.node or f"node-{pod.name}", ip="10.0.0.1")

    def _finish(self, pod):
        if not pod.over:
            self.end(pod, 143)
        self._count_of_owner(pod.uid)
        self._remove_pod(pod.uid)

    def _count_of_owner(self, uid):
        """A Job's finalizer keeps a pod until its end is counted."""
        for ref, found in self.objects.items():
            if ref.kind == "Job" and found["metadata"]["uid"] == self.owners[uid] and uid not in self.counted:
                self.counted.add(uid)
                self._count(found.setdefault("status", {}), self.pods[uid])

    def _remove_pod(self, uid):
        del self.pods[uid], self.owners[uid]

    def delete_pod(self, uid):
        """As by the API: with grace, unless no node has it or it is over."""
        pod = self.pods[uid]
        if pod.node is None or (pod.over and pod.role == "searcher"):
            self._remove_pod(uid)
        elif pod.over:
            self._count_of_owner(uid)
            self._remove_pod(uid)
        elif pod.deletion_deadline is None:
            self.set(pod, deletion_deadline=self.now + GRACE, ready=False)

    def set(self, pod, **changes):
        """A pod's new state."""
        self.pods[pod.uid] = replace(self.pods[pod.uid], **changes)
        return self.pods[pod.uid]

    def end(self, pod, code, *, reason=None, message="", progress=None):
        """The trainer's process ends."""
        word = Termination(exit_code=code if code >= 0 else 1, message=message, progress=progress)
        ended = Ended(code, reason or ("Completed" if code == 0 else "Error"), message, word)
        self.set(pod, phase="Succeeded" if code == 0 else "Failed", ready=False, ended=ended)

    def crash_searcher(self, pod, code, *, reason="Error", message=""):
        """A searcher's container ends and is started again."""
        ended = Ended(code, reason, message, None)
        self.set(pod, ready=False, last_ended=ended, waiting_reason="CrashLoopBackOff")

    def disrupt(self, pod):
        """Preemption or drain."""
        self.set(pod, disrupted=True)
        self.delete_pod(pod.uid)

    def speak(self, **changes):
        """The trainer answers /progress."""
        (pod,) = (pod for pod in self.living_trainers() if pod.node_rank == 0)
        self.progress = ProgressSample(said(pod.uid, **changes), self.now)

    def lose_node(self, pod):
        """Its node stops answering and the pod is evicted."""
        self.sick_nodes.add(self.pods[pod.uid].node)
        self.delete_pod(pod.uid)
