"""Names and labels of everything the controller makes. A job's name has at most 40 characters, so each fits 63."""

from tba_operator.api import ATTEMPT_LABEL, JOB_LABEL, ROLE_LABEL, Role

HTTP_PORT = 8080
RENDEZVOUS_PORT = 29500
"""Where the pod of completion index 0 waits for those of the other nodes: torch's own choice."""
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""Of a Job's pods, by its controller: the node rank of a trainer pod."""
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"
"""Of a Job's pods, by its controller: the Job's uid, the same on all pods of an attempt."""
CONTAINER: dict[Role, str] = {"trainer": "trainer", "searcher": "searcher"}


def config_map(job: str) -> str:
    """ConfigMap with run.json and live.json."""
    return f"{job}-config"


def role_name(job: str, role: Role) -> str:
    """Headless Service, ServiceAccount and NetworkPolicy of a role; also the StatefulSet and PodDisruptionBudget."""
    return f"{job}-{role}"


def trainer_job(job: str, attempt: int) -> str:
    """Job of a trainer attempt; its pods' host names are this and `-0`, `-1`, …"""
    return f"{job}-trainer-{attempt}"


def rendezvous(job: str, attempt: int) -> str:
    """HOST:PORT of an attempt's pod of index 0, by the trainer's headless Service."""
    return f"{trainer_job(job, attempt)}-0.{role_name(job, 'trainer')}:{RENDEZVOUS_PORT}"


def workload(job: str) -> str:
    """Kueue Workload."""
    return f"{job}-tba"


def selector_labels(job: str, role: Role) -> dict[str, str]:
    """What selects a role's pods; immutable."""
    return {JOB_LABEL: job, ROLE_LABEL: role}


def labels(job: str, role: Role | None = None, attempt: int | None = None) -> dict[str, str]:
    """Labels of a child."""
    found = {
        "app.kubernetes.io/name": "tba",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": "tba-operator",
        JOB_LABEL: job,
    }
    if role is not None:
        found |= {"app.kubernetes.io/component": role, ROLE_LABEL: role}
    if attempt is not None:
        found[ATTEMPT_LABEL] = str(attempt)
    return found


def selector(job: str, role: Role) -> str:
    """`selector_labels` as a string, for /scale."""
    return ",".join(f"{name}={value}" for name, value in selector_labels(job, role).items())
