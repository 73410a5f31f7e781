"""What to do about one job now: a pure function of the job, what is observed, the time and the chart's settings.

    job, observed ──▶ not ours, or going away? ──────────────────────────────────────────────▶ nothing
                          │
                          ▼
      queue (Kueue) ──▶ running? ──▶ trainer: which attempt, what stands in its way      attempts.py
                          │
                          ├──▶ faults: what is wrong                                     faults.py
                          ├──▶ verdict: Complete or Failed, by whom or by when           lifecycle.py
                          ├──▶ searchers: how many, and who says so                      scaling.py, here
                          ▼
                       status ──▶ events                                                 status.py, notes.py
                          │
       ┌──────────────┬───┴──────────┬──────────────────┐
       ▼              ▼              ▼                  ▼
     running        stopped        verdict is new     finished
     apply what     remove pods,   write it down      clean up as cleanupPolicy says,
     is missing     keep the rest  before acting      remove the job when its time is over

Nothing is remembered between passes but what status holds (and the autoscaler's memory). So a pass can be lost,
repeated, or made from an older view: it does the same again, or less.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tba_operator import kueue, lifecycle, manifests, scaling
from tba_operator.api import INPUTS_ANNOTATION, MANAGED_BY, Images, Job, JobStatus
from tba_operator.attempts import LOST_SECONDS, Attempt, attempts, course, is_done, is_lost
from tba_operator.drift import differs
from tba_operator.faults import UNSCHEDULABLE_SECONDS, faults, searcher_set
from tba_operator.inputs import Placement
from tba_operator.kueue import Admission
from tba_operator.notes import notes
from tba_operator.status import Findings, Is, compose, invalid, is_written, living, trainer_status
from tba_operator.world import (
    ApplyError,
    Delete,
    Manifest,
    Note,
    Observed,
    Plan,
    Ref,
    Scale,
    ScalingMemory,
    Settings,
    ref_of,
)

ERROR_SECONDS = 30.0
"""After a refused write."""
LOOK_AGAIN_SECONDS = 30.0
"""While a pod outlives its grace period on a node that answers yet."""
AT_ONCE_SECONDS = 1.0
_PRUNED = ("NetworkPolicy", "PodDisruptionBudget")
"""Kinds that the spec or the chart can switch off again."""


@dataclass(frozen=True, slots=True)
class _Searchers:
    """How many there should be."""

    desired: int
    scaled_by: str
    memory: ScalingMemory | None = None
    clamped: str | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    """A job with everything that was found out about it."""

    job: Job
    observed: Observed
    now: float
    settings: Settings
    images: Images
    """For pods; `found.images` is what status keeps of them."""
    admission: Admission | None
    found: Findings
    searchers: _Searchers


@dataclass(slots=True)
class _Actions:
    rehearse: list[Manifest] = field(default_factory=list)
    apply: list[Manifest] = field(default_factory=list)
    scale: list[Scale] = field(default_factory=list)
    delete: list[Delete] = field(default_factory=list)
    replace_status: list[Manifest] = field(default_factory=list)
    delete_job: bool = False


def plan(job: Job, observed: Observed, now: float, settings: Settings) -> Plan:
    """What should happen now. On a job that is as it should be: nothing."""
    if job.deleting or job.spec.managed_by != MANAGED_BY:
        return Plan()
    case = _examine(job, observed, now, settings)
    status = compose(job, observed, now, case.found)
    actions = _act(case, status)
    return Plan(
        rehearse=tuple(actions.rehearse),
        apply=tuple(actions.apply),
        scale=tuple(actions.scale),
        delete=tuple(actions.delete),
        replace_status=tuple(actions.replace_status),
        status=None if is_written(job, status) else status,
        notes=notes(job, status, scaled_by=case.searchers.scaled_by),
        requeue_after_seconds=_requeue(case),
        scaling=case.searchers.memory,
        delete_job=actions.delete_job,
    )


def plan_invalid(manifest: Manifest, message: str, now: float) -> Plan:
    """For a TBAJob that `parse_job` refuses with `message`: nothing of it is touched, and its status says why."""
    if "deletionTimestamp" in manifest["metadata"]:
        return Plan()
    status = invalid(manifest, message, now)
    return Plan() if status is None else Plan(status=status, notes=(Note("Warning", "InvalidSpec", message),))


# -- finding out


def _examine(job: Job, observed: Observed, now: float, settings: Settings) -> _Case:
    admission = _admission(job, observed)
    running = not job.finished and not job.spec.suspend and (admission is None or admission.state == "Admitted")
    resolved, images = _images(job, settings)
    placed = _unplaced(admission) is None
    inputs = manifests.trainer_inputs(job, images, admission.trainer if admission else None) if placed else None
    trainer = course(job, observed, now, inputs=inputs, running=running)
    counted = trainer_status(job, observed, trainer)
    since = lifecycle.clock(job, observed, now, running=running, ready=counted.ready)
    wrong = faults(job, observed, now, images=images, course=trainer, running=running)
    searchers = _searchers(job, observed, now, running=running, admission=admission)
    found = Findings(
        images=resolved,
        running=running,
        admitted=_admitted(job, admission),
        since=since,
        course=trainer,
        trainer=counted,
        faults=wrong,
        verdict=lifecycle.verdict(job, observed, now, trainer=counted, since=since, faults=wrong),
        desired=searchers.desired,
        clamped=searchers.clamped,
    )
    return _Case(job, observed, now, settings, images, admission, found, searchers)


def _images(job: Job, settings: Settings) -> tuple[Images, Images]:
    """(what status keeps of the chart's defaults, what pods get). A default is taken once: an upgrade rolls no pod."""
    known, spec = job.status.images, job.spec
    resolved = Images(
        trainer=known.trainer or (None if spec.trainer.image else settings.trainer_image or None),
        searcher=known.searcher or (None if spec.searcher.image else settings.searcher_image or None),
    )
    return resolved, Images(
        trainer=spec.trainer.image or resolved.trainer, searcher=spec.searcher.image or resolved.searcher
    )


def _admission(job: Job, observed: Observed) -> Admission | None:
    """What the queue says; null: the job asks for none."""
    if job.queue is None:
        return None
    if not observed.kueue:
        message = f"Queue {job.queue} is asked for, but the cluster has no Kueue: install it, or remove the queue label"
        return Admission("Waiting", message)
    found = _workload(observed)
    refusal = kueue.refusal(job, observed.priority_class, observed.denied) if found is None else None
    if refusal is not None:
        return Admission("Waiting", refusal)
    started = job.status.start_time is not None
    return kueue.admission(found, observed.flavors, observed.denied, started=started)


def _unplaced(admission: Admission | None) -> str | None:
    return admission.unplaced if admission is not None else None


def _admitted(job: Job, admission: Admission | None) -> Is | None:
    if admission is None:
        return None
    if job.finished:
        return Is("Admitted", "False", "Finished", "The job is over")
    status = "True" if admission.state == "Admitted" else "False"
    return Is("Admitted", status, admission.state, admission.message)


def _searchers(job: Job, observed: Observed, now: float, *, running: bool, admission: Admission | None) -> _Searchers:
    memory = observed.scaling
    if job.finished:
        kept = job.spec.run_policy.cleanup_policy == "None"
        return _Searchers(_replicas(searcher_set(observed)) if kept else 0, "the end of the job", memory)
    if not running:
        return _Searchers(0, "spec.suspend" if job.spec.suspend else "the queue", memory)
    wanted, scaled_by = job.spec.searcher.replicas, "spec.searcher.replicas"
    policy = job.spec.searcher.autoscaling
    if policy.mode == "Managed":
        ready = sum(1 for pod in observed.pods if pod.role == "searcher" and pod.ready)
        memory = scaling.decide(policy, wanted, memory, observed.progress, job=job, ready=ready, now=now)
        wanted, scaled_by = memory.desired, "the autoscaler"
    else:
        memory = None  # one that is switched on again goes on from what there is then
    desired, clamped = kueue.clamp(wanted, admission)
    return _Searchers(desired, scaled_by if clamped is None else f"queue {job.queue}", memory, clamped)


# -- acting


def _act(case: _Case, status: JobStatus) -> _Actions:
    actions = _Actions()
    if case.job.finished:
        _clean_up(case, actions)
    elif case.found.verdict is None:
        _keep_furniture(case, actions)
        _keep_workload(case, actions)
        _keep_searchers(case, actions)
        _keep_trainer(case, actions)
    _remove_lost_searchers(case, actions)
    _settle_workload(case, status, actions)
    return actions


def _keep_furniture(case: _Case, actions: _Actions) -> None:
    """Everything that is no pod."""
    job, observed = case.job, case.observed
    wanted = manifests.furniture(job, case.settings, case.searchers.desired)
    actions.apply += [manifest for manifest in wanted if _is_due(manifest, case)]
    kept = {ref_of(manifest) for manifest in wanted}
    actions.delete += [
        Delete(ref, _uid(child))
        for ref, child in observed.children.items()
        if ref.kind in _PRUNED and ref not in kept and not _is_going(child)
    ]


def _is_due(manifest: Manifest, case: _Case) -> bool:
    ref, observed, status = ref_of(manifest), case.observed, case.job.status
    child = observed.children.get(ref)
    if child is None:
        return True
    if _is_going(child) or not differs(manifest, child):
        return False
    # What our own apply left is no drift, however the API server wrote it down; unless something else is asked for now.
    left = (_uid(child), child["metadata"].get("generation"))
    as_before = status.observed_generation == case.job.generation
    as_many = status.searcher.desired_replicas == case.searchers.desired
    return not (as_before and as_many and left == observed.accepted.get(ref))


def _keep_workload(case: _Case, actions: _Actions) -> None:
    """What Kueue knows of the job: made to ask for quota, removed when the job is suspended and no pod uses it."""
    job, observed, found = case.job, case.observed, _workload(case.observed)
    if job.queue is not None and observed.kueue and not job.spec.suspend:
        manifest = _new_workload(case, found) if case.images.trainer and case.images.searcher else None
        if manifest is not None and _is_due(manifest, case):
            actions.apply.append(manifest)
    elif found is not None and not _is_going(found) and not living(observed, case.now):
        actions.delete.append(Delete(ref_of(found), _uid(found)))


def _new_workload(case: _Case, current: Manifest | None) -> Manifest | None:
    """Null: what it refers to is missing, as Admitted says."""
    job, priority = case.job, case.observed.priority_class
    if kueue.refusal(job, priority, case.observed.denied) is not None:
        return None
    count = kueue.wanted_searchers(job)
    trainer = manifests.trainer_job(job, case.images, 1)["spec"]["template"]
    searcher = manifests.searcher_set(job, case.images, count)["spec"]["template"]
    return kueue.workload(job, trainer, searcher, count, current=current, priority_class=priority)


def _settle_workload(case: _Case, status: JobStatus, actions: _Actions) -> None:
    """What the owner of a Workload has to write down: pods ready, quota given back, the end."""
    found = _workload(case.observed)
    if found is None:
        return
    left = bool(living(case.observed, case.now))
    ready = status.is_true("TrainerReady") and status.is_true("SearchersReady")
    settled = kueue.settled(case.job, found, pods_left=left, ready=ready, now=case.now)
    if settled is not None:
        actions.replace_status.append(settled)


def _keep_searchers(case: _Case, actions: _Actions) -> None:
    """The StatefulSet is written whole for another template only; else at most its size."""
    found, desired = searcher_set(case.observed), case.searchers.desired
    if found is not None and _is_going(found):
        return
    if _unplaced(case.admission) is not None:
        desired = min(desired, _replicas(found))
    placement = case.admission.searcher if case.admission else None
    stale = _is_stale(found, case, placement)
    if stale and desired > 0 and case.images.searcher and _unplaced(case.admission) is None:
        manifest = manifests.searcher_set(case.job, case.images, desired, placement)
        if _try(manifest, case, actions):
            return
    if found is not None and _replicas(found) != desired:
        actions.scale.append(Scale(ref_of(found), desired))


def _is_stale(found: Manifest | None, case: _Case, placement: Placement | None) -> bool:
    """Whether the searchers need another template."""
    if found is None:
        return True
    if case.admission is not None and _replicas(found) == 0:
        return True  # a flavor may have been edited since the last pod, and there is none that could be rolled
    return _inputs(found) != manifests.searcher_inputs(case.job, case.images, placement)


def _keep_trainer(case: _Case, actions: _Actions) -> None:
    trainer = case.found.course
    actions.delete += [_removal(attempt) for attempt in trainer.drop]
    may_be_made = trainer.waits_for is None and _unplaced(case.admission) is None
    if case.found.running and trainer.current is None and may_be_made and case.images.trainer:
        placement = case.admission.trainer if case.admission else None
        _try(manifests.trainer_job(case.job, case.images, trainer.number, placement), case, actions)


def _try(workload: Manifest, case: _Case, actions: _Actions) -> bool:
    """Apply a new pod template after its rehearsal, but not one that was refused and has not changed since."""
    error = case.observed.errors.get(ref_of(workload))
    if error is not None and error.kind == "InvalidPodTemplate":
        return False
    actions.rehearse.append(manifests.rehearsal_pod(workload))
    actions.apply.append(workload)
    return True


def _remove_lost_searchers(case: _Case, actions: _Actions) -> None:
    """Their names are wanted by the pods that take their place; nobody else will ever free them."""
    for pod in case.observed.pods:
        if pod.role == "searcher" and is_lost(pod, case.observed, case.now):
            ref = Ref("v1", "Pod", case.job.namespace, pod.name)
            actions.delete.append(Delete(ref, pod.uid, grace_seconds=0))


def _clean_up(case: _Case, actions: _Actions) -> None:
    """What becomes of the children of a finished job. Nothing is ever made anew."""
    policy, observed = case.job.spec.run_policy.cleanup_policy, case.observed
    found = searcher_set(observed)
    if policy != "None":
        there = [attempt for attempt in attempts(observed) if not attempt.deleting]
        actions.delete += [_removal(a) for a in there if policy == "All" or not is_done(a, observed)]
    if found is not None and not _is_going(found):
        if policy == "All":
            actions.delete.append(Delete(ref_of(found), _uid(found)))
        elif policy == "Running" and _replicas(found) != 0:
            actions.scale.append(Scale(ref_of(found), 0))
    expiry = lifecycle.expiry(case.job)
    actions.delete_job = expiry is not None and case.now >= expiry


def _removal(attempt: Attempt) -> Delete:
    return Delete(attempt.ref, attempt.uid)


# -- when to look again


def _requeue(case: _Case) -> float | None:
    """Seconds until time alone changes something."""
    job, now = case.job, case.now
    if case.found.verdict is not None:
        return AT_ONCE_SECONDS
    moments = [*_pod_moments(case)]
    if job.finished:
        expiry = lifecycle.expiry(job)
        moments += [expiry] if expiry is not None else []
    else:
        moments += lifecycle.deadlines(job.spec.run_policy, case.found.since)
        moments += [now + ERROR_SECONDS] if any(_passes(e) for e in case.observed.errors.values()) else []
    return max(AT_ONCE_SECONDS, min(moments) - now) if moments else None


def _passes(error: ApplyError) -> bool:
    return error.kind != "InvalidPodTemplate"


def _pod_moments(case: _Case) -> Iterator[float]:
    now = case.now
    for pod in case.observed.pods:
        if pod.over:
            continue
        if pod.unschedulable is not None:
            since = pod.unschedulable_since if pod.unschedulable_since is not None else pod.created
            if now < since + UNSCHEDULABLE_SECONDS:
                yield since + UNSCHEDULABLE_SECONDS
        if pod.deletion_deadline is not None and not is_lost(pod, case.observed, now):
            mark = pod.deletion_deadline + LOST_SECONDS + AT_ONCE_SECONDS
            yield mark if mark > now else now + LOOK_AGAIN_SECONDS


# -- reading manifests


def _workload(observed: Observed) -> Manifest | None:
    return next((child for ref, child in observed.children.items() if ref.kind == "Workload"), None)


def _replicas(found: Manifest | None) -> int:
    """Of a StatefulSet; absent: the API server's default."""
    return 0 if found is None else (found.get("spec") or {}).get("replicas", 1)


def _inputs(found: Manifest) -> str | None:
    return (found["metadata"].get("annotations") or {}).get(INPUTS_ANNOTATION)


def _uid(found: Manifest) -> str:
    return found["metadata"].get("uid", "")


def _is_going(found: Manifest) -> bool:
    return "deletionTimestamp" in found["metadata"]
