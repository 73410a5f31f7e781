"""Pods as the API server holds them, for what reads them."""

from typing import Any

CREATED = "2027-01-15T08:00:00Z"
CREATED_SECONDS = 1_800_000_000.0


def raw_pod(
    role="trainer",
    name=None,
    *,
    phase="Running",
    container: dict[str, Any] | None = None,
    others=(),
    init=(),
    conditions=(),
    status: dict[str, Any] | None = None,
    node: str | None = "node-1",
    **metadata,
):
    """`container`: the role's containerStatus; `others`, `init`: more of them; `metadata`: added to it."""
    name = name or f"gsm8k-{role}-0"
    labels = {"tba.dev/job-name": "gsm8k", "tba.dev/role": role}
    if role == "trainer":
        labels["tba.dev/attempt"] = "1"
    labels |= metadata.pop("labels", {})
    kind, owner = (
        ("Job", f"gsm8k-trainer-{labels.get('tba.dev/attempt')}")
        if role == "trainer"
        else ("StatefulSet", "gsm8k-searcher")
    )
    found = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "labels": labels,
            "ownerReferences": [{"kind": kind, "name": owner, "uid": f"uid-{owner}", "controller": True}],
            "creationTimestamp": CREATED,
            **metadata,
        },
        "spec": {"containers": [{"name": role}]} | ({"nodeName": node} if node else {}),
        "status": {"phase": phase, "conditions": list(conditions), **(status or {})},
    }
    statuses = [{"name": role, **container}] if container is not None else []
    if statuses or others:
        found["status"]["containerStatuses"] = [*others, *statuses]
    if init:
        found["status"]["initContainerStatuses"] = list(init)
    return found


def waiting(reason, message=""):
    """State of a container that does not run."""
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def terminated(code, reason="Error", message="", when="state"):
    """State of a container that ended."""
    return {when: {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": CREATED}}}


def condition(kind, status="True", **more):
    """A condition of a pod."""
    return {"type": kind, "status": status, **more}
