"""What a reconcile sees (`Observed`), what it wants (`Plan`), and the operator's own settings. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tba.contracts.history import Progress
from tba.contracts.termination import Termination
from tba_operator.api import JobStatus, Role

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ref:
    """One object in the API server."""

    api_version: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def ref_of(manifest: Manifest) -> Ref:
    """The object that a manifest describes."""
    metadata = manifest["metadata"]
    return Ref(manifest["apiVersion"], manifest["kind"], metadata.get("namespace", ""), metadata["name"])


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended."""

    exit_code: int
    reason: str
    """Kubernetes' word: Completed, Error, OOMKilled, …"""
    message: str
    """The process's own last words: of its `Termination`, else the end of its log."""
    termination: Termination | None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a job, as far as decisions need it."""

    name: str
    uid: str
    role: Role
    attempt: int | None
    """Of a trainer pod."""
    phase: str
    ready: bool
    created: float
    ip: str | None = None
    node: str | None = None
    """null: not scheduled."""
    deletion_deadline: float | None = None
    """Unix seconds at which its grace period ends; null: not being deleted."""
    unschedulable: str | None = None
    """The scheduler's message."""
    unschedulable_since: float | None = None
    waiting_reason: str | None = None
    """Of the role's container: ImagePullBackOff, CrashLoopBackOff, CreateContainerConfigError, …"""
    waiting_message: str | None = None
    disrupted: bool = False
    """Has the condition DisruptionTarget: preemption, eviction, node shutdown."""
    ended: Ended | None = None
    """The current end, of a pod that is over."""
    last_ended: Ended | None = None
    """The end before the current container."""
    revision: str | None = None
    """controller-revision-hash of a searcher."""
    owner: str | None = None
    """KIND/NAME of its controller."""
    node_rank: int = 0
    """Of a trainer pod; rank 0's speaks for all."""

    @property
    def over(self) -> bool:
        """Succeeded or Failed: it runs no more."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """An answer of the trainer's /progress."""

    progress: Progress
    received: float
    """Unix seconds."""


ErrorKind = Literal[
    "InvalidPodTemplate", "QuotaExceeded", "NameConflict", "NamespaceTerminating", "Forbidden", "Unavailable"
]


@dataclass(frozen=True, slots=True)
class ApplyError:
    """Why an object could not be written; what retrying will not mend at once."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Average:
    """A moving average that begins as the plain mean of its first samples, so that none of them weighs for long."""

    value: float | None = None
    count: int = 0

    def with_sample(self, measured: float, share: float) -> "Average":
        """`share` in [0, 1] is the weight of a sample in the long run."""
        count = self.count + 1
        known = measured if self.value is None else self.value
        return Average(known + max(share, 1.0 / count) * (measured - known), count)


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What the autoscaler carries from one decision to the next."""

    started_from: int
    """spec.searcher.replicas when it began; a change of it restarts."""
    desired: int
    recommendations: tuple[tuple[float, float], ...] = ()
    """(Unix seconds, searchers needed, not rounded) within the stabilisation window, oldest first."""
    rate: Average = Average()
    """Trajectories a second of one warm searcher, the last known."""
    demand: Average = Average()
    """Trajectories a second that the trainer would take if it never waited, smoothed."""
    last_sample: float | None = None
    """`received` of the newest sample that was used."""
    pool: int | None = None
    """Searchers heard of."""
    pool_since: float | None = None
    """Unix seconds since which the pool has not grown, and storage was reachable."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything a plan is made from, besides the job itself."""

    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    """Owned by the job: its configuration, Services, accounts, policies, Jobs, StatefulSet, budget and Workload."""
    pods: tuple[Pod, ...] = ()
    """Of the job's own StatefulSet and trainer Jobs."""
    strays: tuple[Pod, ...] = ()
    """Trainer pods that run and are none of these: of a deleted namesake, without their Job. Only ever waited for."""
    progress: ProgressSample | None = None
    not_ready_nodes: frozenset[str] = frozenset()
    """Nodes, of those that hold pods of this job, that are NotReady or gone."""
    create_failures: tuple[str, ...] = ()
    """Messages of recent FailedCreate events of the StatefulSet or trainer Job while pods are missing."""
    kueue: bool = False
    """Whether the cluster has Kueue's API."""
    accepted: Mapping[Ref, tuple[str, int]] = field(default_factory=dict)
    """(uid, generation) that our own last apply left: the API server's normalisation of it is no drift."""
    errors: Mapping[Ref, ApplyError] = field(default_factory=dict)
    """Of the newest apply of this generation."""
    scaling: ScalingMemory | None = None
    flavors: Mapping[str, Manifest] = field(default_factory=dict)
    """Kueue's ResourceFlavors by name: those that `kueue.flavor_names` of the Workload says."""
    priority_class: Manifest | None = None
    """What `kueue.priority_class` of the job names; null: it names none, or there is none of that name."""
    denied: Mapping[Ref, str] = field(default_factory=dict)
    """Of these two, what the operator may not read, with the API server's words, which name the missing right."""


@dataclass(frozen=True, slots=True)
class Delete:
    """An object to remove."""

    ref: Ref
    uid: str
    """Precondition: only this very object."""
    grace_seconds: int | None = None
    """0: force, for a pod whose node is lost."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A new replica count of a StatefulSet whose template stays as it is."""

    ref: Ref
    replicas: int


@dataclass(frozen=True, slots=True)
class Note:
    """A Kubernetes Event about the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    """UpperCamelCase."""
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What should happen now. Nothing in it: nothing to do."""

    rehearse: tuple[Manifest, ...] = ()
    """Pods to create with dry-run before `apply`: refused ones keep what they stand for from being applied."""
    apply: tuple[Manifest, ...] = ()
    """Whole objects for server-side apply, in order."""
    scale: tuple[Scale, ...] = ()
    delete: tuple[Delete, ...] = ()
    replace_status: tuple[Manifest, ...] = ()
    """Whole objects of others as read, with a new `status`: written by update, so refused if anything changed since."""
    status: JobStatus | None = None
    """null: as it is."""
    notes: tuple[Note, ...] = ()
    requeue_after_seconds: float | None = None
    scaling: ScalingMemory | None = None
    """To hand to the next plan."""
    delete_job: bool = False
    """ttlSecondsAfterFinished is over: remove the TBAJob itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the chart says to the controller."""

    namespace: str = "tba-system"
    """The operator's own: home of its Lease; trainers let it in."""
    watch_namespaces: tuple[str, ...] = ()
    """Empty: all."""
    trainer_image: str = ""
    searcher_image: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    network_policy: bool = True
    metrics_namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """Namespaces that may scrape workload pods; empty: all."""
    resync_seconds: float = 600.0
    progress_seconds: float = 10.0
    progress_through_api: bool = False
    """Out-of-cluster development: read /progress through the API server's pod proxy."""
    workers: int = 4
    requests_per_second: float = 100.0
    """To the API server, over all workers; its own priority and fairness protect it from many operators."""
    request_burst: int = 200
    http_port: int = 8080
    identity: str = ""
    """Of the Lease holder: the pod's name."""
    lease_name: str = "tba-operator"
    """One of its own for each release of the chart: two in one namespace may watch different namespaces."""
