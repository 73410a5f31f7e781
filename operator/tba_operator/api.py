"""The resource as the API server holds it: names, labels, and a TBAJob read into models.

`JobStatus` is what the controller writes; the CRD's status schema is generated from it (crd.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field, ValidationError

from tba.contracts.base import Contract
from tba.contracts.errors import UserError
from tba.contracts.explain import explain
from tba.contracts.job import JobSpec
from tba.contracts.newer import known_fields

GROUP = "tba.dev"
VERSION = "v1alpha1"
KIND = "TBAJob"
PLURAL = "tbajobs"
MANAGED_BY = "tba.dev/tbajob-controller"

JOB_LABEL = "tba.dev/job-name"
ROLE_LABEL = "tba.dev/role"
ATTEMPT_LABEL = "tba.dev/attempt"
INPUTS_ANNOTATION = "tba.dev/inputs-hash"
"""Hash of what a pod template was rendered from; equal hash, no new template (operator.md §2)."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"

Role = Literal["trainer", "searcher"]

_LAST_SECOND = 253_402_300_799.0
"""Of the year 9999."""

CONDITIONS = (
    "Suspended",
    "Admitted",
    "StorageReady",
    "TrainerReady",
    "SearchersReady",
    "Degraded",
    "Complete",
    "Failed",
)
"""In the order in which status lists them. Admitted only with a queue."""


class Images(Contract):
    """Resolved once, so that a new default of the operator rolls no pod."""

    trainer: str | None = None
    searcher: str | None = None


class Condition(Contract):
    """As metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(min_length=1, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    message: str = Field(default="", max_length=32768)
    last_transition_time: str
    observed_generation: int | None = None


class TrainerStatus(Contract):
    """The trainer pod."""

    attempt: int = 0
    """Number of the newest trainer Job: 1, 2, …; a template change, a resume or a lost node takes the next."""
    pod_name: str | None = None
    ready: bool = False
    restarts: int = 0
    """Ends of a trainer pod that were followed by another, counted or not."""
    failures: int = 0
    """Counted ends over the life of the job: not preemption, SIGTERM or storage outage."""
    failures_at_checkpoint: int = 0
    """`failures` when the newest checkpoint was first seen; the difference is held against backoffLimit."""
    attempt_failures: int = 0
    """The share of `failures` that the newest attempt's Job has reported."""
    attempt_uid: str | None = None
    """UID of that Job: one made again under its name reports from 0."""
    checkpoint_step: int | None = None
    last_exit_code: int | None = None
    last_reason: str | None = None
    last_message: str | None = None


class SearcherStatus(Contract):
    """The searcher pods; `replicas` and `selector` serve /scale."""

    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    desired_replicas: int = 0
    selector: str = ""


class ProgressStatus(Contract):
    """The last word of the trainer's /progress."""

    step: int = 0
    total_steps: int = 0
    percentage: float = 0.0
    policy_version: int = 0
    reward: float | None = None
    eval_score: float | None = None
    staleness_mean: float | None = None
    trainer_idle_percent: float | None = None
    trajectories: int = 0
    replay_ratio: float | None = None
    eta_seconds: float | None = None
    last_updated_time: str | None = None


class JobStatus(Contract):
    """`status` of a TBAJob."""

    observed_generation: int | None = None
    phase: str | None = None
    """For people only; nothing is decided from it."""
    start_time: str | None = None
    completion_time: str | None = None
    images: Images = Images()
    conditions: list[Condition] = Field(default_factory=list)
    trainer: TrainerStatus = TrainerStatus()
    searcher: SearcherStatus = SearcherStatus()
    progress: ProgressStatus | None = None

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type."""
        return next((c for c in self.conditions if c.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Whether the condition is there and True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    def dump(self) -> dict[str, Any]:
        """As the API server takes it: camelCase, without nulls."""
        return self.model_dump(mode="json", exclude_none=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One TBAJob as read."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    """Unix seconds."""
    deleting: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: JobSpec
    status: JobStatus
    raw_status: Mapping[str, Any]
    """Exactly as read, to see whether a write would change anything."""

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name)."""
        return self.namespace, self.name

    @property
    def owner(self) -> str:
        """namespace/name, as in the bucket's run.json."""
        return f"{self.namespace}/{self.name}"

    @property
    def queue(self) -> str | None:
        """Kueue's LocalQueue, if the job asks for one."""
        return self.labels.get(QUEUE_LABEL) or None

    @property
    def finished(self) -> bool:
        """Complete or Failed: for good."""
        return self.status.is_true("Complete") or self.status.is_true("Failed")


class InvalidJob(UserError):
    """A TBAJob that the schema let pass and the models refuse; the message names field, value and remedy."""


def parse_job(manifest: Mapping[str, Any]) -> Job:
    """A TBAJob as a dict into models. Fields that this release does not know are dropped, as an API server would.

    Raises: InvalidJob.
    """
    metadata = manifest["metadata"]
    raw_status = manifest.get("status") or {}
    try:
        spec = JobSpec.model_validate(known_fields(JobSpec, manifest.get("spec") or {}))
    except ValidationError as error:
        raise InvalidJob(str(explain(error, f"{metadata.get('namespace', 'default')}/{metadata['name']}"))) from error
    return Job(
        namespace=metadata.get("namespace", "default"),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        deleting="deletionTimestamp" in metadata,
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        spec=spec,
        status=parse_status(raw_status),
        raw_status=raw_status,
    )


def parse_status(raw: Mapping[str, Any]) -> JobStatus:
    """Status as read; one that cannot be understood (written by hand) counts as none."""
    try:
        return JobStatus.model_validate(known_fields(JobStatus, raw))
    except ValidationError:
        return JobStatus()


def parse_time(text: str | None) -> float | None:
    """RFC 3339 to Unix seconds."""
    return None if not text else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def format_time(seconds: float) -> str:
    """Unix seconds to RFC 3339, whole seconds, UTC; what is outside the years 1970 to 9999 is their nearest second."""
    bounded = min(max(seconds, 0.0), _LAST_SECOND)
    return datetime.fromtimestamp(int(bounded), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
