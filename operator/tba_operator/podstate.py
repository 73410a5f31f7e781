"""A pod as the API server holds it, read into a `Pod`. Pure."""

from collections.abc import Mapping
from typing import Any

from tba.contracts.termination import read_termination
from tba_operator import naming
from tba_operator.api import ATTEMPT_LABEL, ROLE_LABEL, Role, parse_time
from tba_operator.world import Ended, Manifest, Pod

NO_EXIT_CODE = -1
"""Of a pod that ended before its container ran, or whose container left no status: evicted, refused by the node."""
MAX_MESSAGE_CHARS = 2000
STARTING = ("ContainerCreating", "PodInitializing")
"""Waiting reasons that every pod passes through."""


def has_role(raw: Manifest) -> bool:
    """Whether an object is a pod of a trainer or a searcher by its label."""
    return (raw["metadata"].get("labels") or {}).get(ROLE_LABEL) in naming.CONTAINER


def belongs_to(pod: Pod, job: str) -> bool:
    """Whether a pod's controller is the workload that its labels tell of: labels alone are easily copied."""
    if pod.role == "searcher":
        return pod.owner == f"StatefulSet/{naming.role_name(job, 'searcher')}"
    return pod.attempt is not None and pod.owner == f"Job/{naming.trainer_job(job, pod.attempt)}"


def pod_of(raw: Manifest) -> Pod:
    """A pod as the API server holds it (`has_role`) into what decisions need."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    role: Role = labels[ROLE_LABEL]
    attempt = labels.get(ATTEMPT_LABEL, "")
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    phase = status.get("phase", "Pending")
    over = phase in ("Succeeded", "Failed")
    own = _own_container(raw, role)
    waiting = _waiting(raw, role)
    scheduled = conditions.get("PodScheduled", {})
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    ended, last_ended = _ends(own, status, over=over)
    index = labels.get(naming.INDEX_LABEL, "")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=role,
        attempt=int(attempt) if attempt.isdigit() else None,
        phase=phase,
        ready=conditions.get("Ready", {}).get("status") == "True",
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        ip=status.get("podIP") or None,
        node=(raw.get("spec") or {}).get("nodeName") or None,
        # The API server writes now + grace into it: the moment of the kill, not of the request.
        deletion_deadline=parse_time(metadata.get("deletionTimestamp")),
        unschedulable=(scheduled.get("message") or "unschedulable") if unschedulable else None,
        unschedulable_since=parse_time(scheduled.get("lastTransitionTime")) if unschedulable else None,
        waiting_reason=waiting[0] if waiting else None,
        waiting_message=waiting[1] if waiting else None,
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
        ended=ended,
        last_ended=last_ended,
        revision=labels.get("controller-revision-hash"),
        owner=next(
            (f"{o['kind']}/{o['name']}" for o in metadata.get("ownerReferences") or () if o.get("controller")), None
        ),
        node_rank=int(index) if index.isdigit() else 0,
    )


def _own_container(raw: Manifest, role: Role) -> Mapping[str, Any]:
    statuses = (raw.get("status") or {}).get("containerStatuses") or ()
    return next((c for c in statuses if c.get("name") == naming.CONTAINER[role]), {})


def _waiting(raw: Manifest, role: Role) -> tuple[str, str] | None:
    """(reason, message) why the pod does not run: of the role's container, an init container or a sidecar."""
    status = raw.get("status") or {}
    own = (_own_container(raw, role).get("state") or {}).get("waiting")
    if own and own.get("reason") not in STARTING:
        return own.get("reason", ""), own.get("message", "")
    others = [("init container", c) for c in status.get("initContainerStatuses") or ()]
    others += [
        ("container", c) for c in status.get("containerStatuses") or () if c.get("name") != naming.CONTAINER[role]
    ]
    for word, container in others:
        found = (container.get("state") or {}).get("waiting")
        if found and found.get("reason") not in STARTING:
            return found.get("reason", ""), f"{word} {container['name']}: {found.get('message', '')}".rstrip(": ")
    return (own.get("reason", ""), own.get("message", "")) if own else None


def _ends(own: Mapping[str, Any], status: Mapping[str, Any], *, over: bool) -> tuple[Ended | None, Ended | None]:
    """(current end of a pod that is over, end before the current container)."""
    now = (own.get("state") or {}).get("terminated")
    before = (own.get("lastState") or {}).get("terminated")
    if not over:
        return None, _ended(now or before) or _failed_init(status)
    if now or status.get("phase") == "Succeeded":
        return _ended(now), _ended(before)
    # Evicted, refused by its node, or stopped by an init container: the pod itself has the words, if any.
    reason = status.get("reason", "Error")
    return _failed_init(status) or Ended(NO_EXIT_CODE, reason, status.get("message", ""), None), None


def _failed_init(status: Mapping[str, Any]) -> Ended | None:
    """An init container's failure, as the end of a container that never ran."""
    for container in status.get("initContainerStatuses") or ():
        for when in ("state", "lastState"):
            end = (container.get(when) or {}).get("terminated")
            if end and end.get("exitCode", 0) != 0 and not container.get("ready"):
                told = end.get("message") or f"exit code {end['exitCode']}"
                message = f"init container {container['name']}: {told}"[-MAX_MESSAGE_CHARS:]
                return Ended(NO_EXIT_CODE, end.get("reason", "Error"), message, None)
    return None


def _ended(state: Mapping[str, Any] | None) -> Ended | None:
    if not state:
        return None
    text = (state.get("message") or "").strip()
    termination = read_termination(text) if text else None
    return Ended(
        exit_code=state.get("exitCode", NO_EXIT_CODE),
        reason=state.get("reason", ""),
        message=termination.message if termination else text[-MAX_MESSAGE_CHARS:],
        termination=termination,
    )
