"""Names and labels of everything the controller makes. A job's name has at most 40 characters, so each fits 63."""

from tba_operator.api import ATTEMPT_LABEL, JOB_LABEL, ROLE_LABEL, Role

HTTP_PORT = 8080
CONTAINER: dict[Role, str] = {"trainer": "trainer", "searcher": "searcher"}


def config_map(job: str) -> str:
    """ConfigMap with run.json and live.json."""
    return f"{job}-config"


def role_name(job: str, role: Role) -> str:
    """Headless Service, ServiceAccount and NetworkPolicy of a role; also the StatefulSet and PodDisruptionBudget."""
    return f"{job}-{role}"


def trainer_job(job: str, attempt: int) -> str:
    """Job of a trainer attempt; its pod's host name is this and `-0`."""
    return f"{job}-trainer-{attempt}"


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
