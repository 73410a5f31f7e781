"""Kueue without a Go integration: the job's Workload, what its admission says, and what its owner owes it. Pure.

    TBAJob with a queue label
        │ workload()                                   podSets trainer (nodes) and searcher (most that may ever run)
        ▼
    Waiting ──Kueue: quota reserved, checks ready──▶ Admitted ──flavors──▶ pods, where the flavors put them
        ▲                                               │ Kueue: preempted, queue stopped, deactivated, too slow
        │ settled(): quota given back                   ▼
        └──────────── no pod is left ◀── pods go ── Evicted

Kueue only writes down that a Workload is evicted. The quota stays reserved until its owner, who alone knows when the
pods are gone, clears the admission: `settled` is that write, and the one that reports the end of the job. While quota
is reserved the Workload's spec may not change: growth beyond what was admitted is clamped, and a job that needs more is
suspended (the Workload goes when no pod is left) and resumed (another one queues up).

Source: Kueue v0.17, pkg/controller/jobframework/reconciler.go (steps 2, 5, 6), pkg/podset/podset.go (FromAssignment).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tba_operator import naming
from tba_operator.api import GROUP, INPUTS_ANNOTATION, KIND, PRIORITY_LABEL, VERSION, Job, Role, format_time
from tba_operator.inputs import Placement, digest
from tba_operator.world import Manifest, Ref

API_VERSION = "kueue.x-k8s.io/v1beta2"
UID_LABEL = "kueue.x-k8s.io/job-uid"
"""By which Kueue's own tools find the Workload of a job."""

_REQUEUED_AT_ONCE = ("Preempted", "NodeFailures")
_MAX_MESSAGE = 32768


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether Kueue lets the job run, and where."""

    state: Literal["Waiting", "Admitted", "Evicted"]
    """Evicted: it has to stop; Waiting again once that is done."""
    message: str
    trainer: Placement | None = None
    searcher: Placement | None = None
    """Both are set if admitted and placed."""
    searcher_count: int | None = None
    """At most so many searchers; null: not admitted."""
    unplaced: str | None = None
    """Why it is not known where new pods would go: none can be made, those that are there stay. Null: it is known."""


# ── the Workload ─────────────────────────────────────────────────────────────────────────────────────────────────────


def workload(
    job: Job,
    trainer_template: Manifest,
    searcher_template: Manifest,
    searcher_count: int,
    *,
    current: Manifest | None = None,
    priority_class: Manifest | None = None,
) -> dict[str, Any]:
    """What to apply for a job with a queue label.

    The templates are those of a job without placement. `current` is the Workload as read: its spec is kept while quota
    is reserved. `active` is never written: that is Kueue's and the administrator's switch.
    """
    metadata: dict[str, Any] = {
        "name": naming.workload(job.name),
        "namespace": job.namespace,
        "labels": naming.labels(job.name) | {UID_LABEL: job.uid},
        "ownerReferences": [
            {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid}
            | {"controller": True, "blockOwnerDeletion": True}
        ],
    }
    if current is not None and _is_true(current, "QuotaReserved"):
        spec = {name: value for name, value in current["spec"].items() if name != "active"}
        kept = current["metadata"].get("annotations", {})
        metadata["annotations"] = {name: text for name, text in kept.items() if name == INPUTS_ANNOTATION}
    else:
        pod_sets = [
            _pod_set("trainer", trainer_template, job.spec.trainer.nodes),
            _pod_set("searcher", searcher_template, searcher_count, at_least=job.spec.searcher.min_available),
        ]
        spec = {"queueName": job.queue, "podSets": pod_sets, **_priority(priority_class)}
        # Of what is no longer asked for the spec alone shows no difference: Kueue and the API server add to it.
        metadata["annotations"] = {INPUTS_ANNOTATION: digest(spec)}
    return {"apiVersion": API_VERSION, "kind": "Workload", "metadata": metadata, "spec": spec}


def wanted_searchers(job: Job) -> int:
    """How many searchers to ask quota for: the most that there may ever be, since an admitted Workload cannot grow."""
    searcher = job.spec.searcher
    if searcher.autoscaling.mode == "Static":
        return searcher.replicas
    return max(searcher.replicas, searcher.autoscaling.max_replicas or 0)


def priority_class(job: Job) -> Ref | None:
    """The object that says how important the job is: of the label, else of runPolicy.priorityClassName."""
    if job.labels.get(PRIORITY_LABEL):
        return Ref(API_VERSION, "WorkloadPriorityClass", "", job.labels[PRIORITY_LABEL])
    if job.spec.run_policy.priority_class_name:
        return Ref("scheduling.k8s.io/v1", "PriorityClass", "", job.spec.run_policy.priority_class_name)
    return None


def refusal(job: Job, priority_class_found: Manifest | None, denied: Mapping[Ref, str]) -> str | None:
    """Why no Workload can be made yet; null: it can. `denied`: what may not be read, and why."""
    named = priority_class(job)
    if named is None or priority_class_found is not None:
        return None
    if named in denied:
        return _without_right(denied[named])
    where = f"label {PRIORITY_LABEL}" if named.kind == "WorkloadPriorityClass" else "spec.runPolicy.priorityClassName"
    return f"{where}: there is no {named.kind} of that name, got {named.name}: create it or change the name"


def flavor(name: str) -> Ref:
    """A ResourceFlavor."""
    return Ref(API_VERSION, "ResourceFlavor", "", name)


def _without_right(told: str) -> str:
    return f"{told}. Grant the operator this right: the chart's ClusterRole has it"


def _pod_set(role: Role, template: Manifest, count: int, at_least: int | None = None) -> dict[str, Any]:
    """`at_least`: Kueue may admit fewer, but so many (and one) if it cannot admit all."""
    metadata = {k: v for k, v in template.get("metadata", {}).items() if k in ("labels", "annotations")}
    spec = _without_fractions(template["spec"])
    found = {"name": role, "count": count, "template": {"metadata": metadata, "spec": spec}}
    if at_least is None or count == 0:
        return found
    return found | {"minCount": min(count, max(1, at_least))}


def _without_fractions(value: Any) -> Any:
    """A pod takes `cpu: 0.5`, Kueue's schema of one only whole numbers and text. All its fractions are quantities."""
    if isinstance(value, Mapping):
        return {name: _without_fractions(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_fractions(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else str(value)


def _priority(found: Manifest | None) -> dict[str, Any]:
    if found is None:
        return {}
    group = found["apiVersion"].partition("/")[0]
    named = {"group": group, "kind": found["kind"], "name": found["metadata"]["name"]}
    return {"priorityClassRef": named, "priority": found.get("value", 0)}


# ── its admission ────────────────────────────────────────────────────────────────────────────────────────────────────


def admission(
    found: Manifest | None,
    flavors: Mapping[str, Manifest] | None = None,
    denied: Mapping[Ref, str] | None = None,
    *,
    started: bool = False,
) -> Admission:
    """What the Workload as read says. `flavors` are the ResourceFlavors that `flavor_names` of it lists.

    `denied`: those of them that may not be read, and why. `started`: the job runs already; it does not stop for a
    flavor that was removed or may not be read any more.
    """
    if found is None:
        return Admission("Waiting", "The Workload is not there yet")
    if "deletionTimestamp" in found["metadata"]:
        return Admission("Evicted", "The Workload is being deleted")
    evicted, reserved = _condition(found, "Evicted"), _condition(found, "QuotaReserved")
    if not found["spec"].get("active", True):
        return Admission("Evicted", "The Workload is deactivated: set its spec.active to true to queue it again")
    if _is_true(found, "QuotaReserved") and evicted and evicted["status"] == "True":
        return Admission("Evicted", f"{evicted.get('reason', '')}: {evicted.get('message', '')}")
    if not _is_true(found, "QuotaReserved"):
        told = (reserved or {}).get("message")
        return Admission("Waiting", told or f"Kueue has said nothing yet; is there a LocalQueue {_queue(found)}?")
    if not _is_true(found, "Admitted"):
        return Admission("Waiting", f"Quota is reserved; {_checks(found)}")
    unplaced = _unplaced(found, flavors or {}, denied or {})
    if unplaced is not None and not started:
        return Admission("Waiting", f"Admitted, but {unplaced}")
    return _admitted(found, flavors or {}, unplaced)


def flavor_names(found: Manifest | None) -> tuple[str, ...]:
    """The ResourceFlavors that a Workload was given, sorted."""
    assigned = [_assignment(found, "trainer"), _assignment(found, "searcher")] if found is not None else []
    return tuple(sorted({flavor for one in assigned for flavor in _flavors(one)}))


def placement(flavors: Mapping[str, Manifest], names: tuple[str, ...]) -> Placement:
    """Node labels and tolerations of these flavors together."""
    selector: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    for name in names:
        spec = flavors[name].get("spec") or {}
        selector |= spec.get("nodeLabels") or {}
        tolerations += [t for t in spec.get("tolerations") or () if t not in tolerations]
    return Placement(selector, tuple(tolerations), names)


def clamp(desired: int, found: Admission | None) -> tuple[int, str | None]:
    """(searchers that may run, why not as many as desired)."""
    admitted = found.searcher_count if found is not None else None
    if admitted is None or desired <= admitted:
        return desired, None
    return admitted, (
        f"Kueue admitted {admitted} searchers, {desired} are wanted: suspend and resume the job to queue for more, "
        f"with autoscaling.maxReplicas at the most that it will need"
    )


def _unplaced(found: Manifest, flavors: Mapping[str, Manifest], denied: Mapping[Ref, str]) -> str | None:
    missing = [name for name in flavor_names(found) if name not in flavors]
    for name in missing:
        if flavor(name) in denied:
            return f"where to is unknown: {_without_right(denied[flavor(name)])}"
    return f"there is no ResourceFlavor {', '.join(missing)}: create it" if missing else None


def _admitted(found: Manifest, flavors: Mapping[str, Manifest], unplaced: str | None) -> Admission:
    searcher = _assignment(found, "searcher")
    planned = next((s.get("count", 1) for s in found["spec"]["podSets"] if s["name"] == "searcher"), 0)
    stays = f"; pods that run go on, but none can be made: {unplaced}" if unplaced is not None else ""
    return Admission(
        "Admitted",
        f"Admitted by ClusterQueue {found['status']['admission'].get('clusterQueue', '')}{stays}",
        trainer=_placed(found, "trainer", flavors) if unplaced is None else None,
        searcher=_placed(found, "searcher", flavors) if unplaced is None else None,
        searcher_count=searcher.get("count", planned),
        unplaced=unplaced,
    )


def _placed(found: Manifest, role: Role, flavors: Mapping[str, Manifest]) -> Placement:
    """Where the flavors put a role, and what admission checks add to that."""
    base = placement(flavors, _flavors(_assignment(found, role)))
    selector, tolerations = dict(base.node_selector), list(base.tolerations)
    checks = found["status"].get("admissionChecks") or ()
    told = [update for check in checks for update in check.get("podSetUpdates") or () if update.get("name") == role]
    updates = [{k: update[k] for k in ("nodeSelector", "tolerations") if update.get(k)} for update in told]
    for update in updates:
        selector |= update.get("nodeSelector") or {}
        tolerations += [t for t in update.get("tolerations") or () if t not in tolerations]
    return Placement(selector, tuple(tolerations), base.flavors, tuple(update for update in updates if update))


def _assignment(found: Manifest, role: Role) -> Mapping[str, Any]:
    assigned = ((found.get("status") or {}).get("admission") or {}).get("podSetAssignments") or ()
    return next((one for one in assigned if one.get("name") == role), {})


def _flavors(assignment: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(set((assignment.get("flavors") or {}).values())))


def _checks(found: Manifest) -> str:
    open_checks = [
        f"{check['name']} ({check.get('message') or check.get('state', '')})"
        for check in found["status"].get("admissionChecks") or ()
        if check.get("state") != "Ready"
    ]
    return f"waits for admission checks: {', '.join(open_checks)}" if open_checks else "Admitted is about to follow"


def _queue(found: Manifest) -> str:
    return f"{found['metadata'].get('namespace', '')}/{found['spec'].get('queueName', '')}"


# ── what its owner owes it ───────────────────────────────────────────────────────────────────────────────────────────


def settled(job: Job, found: Manifest, *, pods_left: bool, ready: bool, now: float) -> dict[str, Any] | None:
    """The Workload with the status that its owner has to write, for an update of /status; null: nothing is owed.

    `pods_left`: some pod of the job still holds resources. `ready`: the trainer and the least number of searchers are
    (Kueue evicts by waitForPodsReady what never says so; once said it stays, since searchers come and go).
    """
    if "deletionTimestamp" in found["metadata"] or _is_true(found, "Finished"):
        return None
    status = found.get("status") or {}
    changes: list[dict[str, Any]] = []
    dropped: tuple[str, ...] = ()
    if job.finished:
        ended = finished_condition(job)
        changes = [ended] if ended is not None and not pods_left else []
    elif _is_true(found, "Evicted"):
        if _is_true(found, "QuotaReserved") and not pods_left:
            changes, dropped = list(_given_back(found)), ("admission",)
    elif ready and _is_true(found, "Admitted") and not _is_true(found, "PodsReady"):
        changes = [_make("PodsReady", "True", "Started", "The trainer and enough searchers are ready")]
    if not changes:
        return None
    kept = {name: value for name, value in status.items() if name not in dropped}
    generation = found["metadata"].get("generation", 1)
    conditions = _merged(status.get("conditions") or (), changes, generation, now)
    return {**found, "status": kept | {"conditions": conditions}}


def finished_condition(job: Job) -> dict[str, Any] | None:
    """How the job ended, as Kueue wants it; null: it has not."""
    for kind, reason in (("Complete", "Succeeded"), ("Failed", "Failed")):
        ended = job.status.condition(kind)
        if ended is not None and ended.status == "True":
            return _make("Finished", "True", reason, ended.message)
    return None


def _given_back(found: Manifest) -> Iterator[dict[str, Any]]:
    """Conditions of a Workload that runs no more and queues up again."""
    evicted = _condition(found, "Evicted") or {}
    reason, message = evicted.get("reason", "Evicted"), evicted.get("message", "")
    yield _make("Requeued", "True" if reason in _REQUEUED_AT_ONCE else "False", reason, message)
    yield _make("QuotaReserved", "False", "Pending", message)
    checked = all(c.get("state") == "Ready" for c in found["status"].get("admissionChecks") or ())
    yield _make(
        "Admitted",
        "False",
        "NoReservation" if checked else "NoReservationUnsatisfiedChecks",
        "The workload has no reservation" + ("" if checked else " and not all checks ready"),
    )
    if _is_true(found, "PodsReady"):
        yield _make("PodsReady", "False", "WaitForStart", "Not all pods are ready or succeeded")


def _make(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message[:_MAX_MESSAGE]}


def _merged(present: Any, changes: list[dict[str, Any]], generation: int, now: float) -> list[dict[str, Any]]:
    """As meta.SetStatusCondition: the time moves only with the status."""
    conditions = {c["type"]: dict(c) for c in present}
    for change in changes:
        before = conditions.get(change["type"])
        same = before is not None and before["status"] == change["status"]
        since = before["lastTransitionTime"] if before is not None and same else format_time(now)
        conditions[change["type"]] = {**change, "lastTransitionTime": since, "observedGeneration": generation}
    return list(conditions.values())


def _condition(found: Manifest, kind: str) -> Mapping[str, Any] | None:
    return next((c for c in (found.get("status") or {}).get("conditions") or () if c["type"] == kind), None)


def _is_true(found: Manifest, kind: str) -> bool:
    condition = _condition(found, kind)
    return condition is not None and condition["status"] == "True"
