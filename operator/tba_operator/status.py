"""`status` of a TBAJob from what was found: conditions, trainer, searchers, progress, phase. Pure.

A function of what is there and of the status before, so that a pass over an unchanged job gives the same again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tba.contracts.history import Progress
from tba.contracts.newer import known_fields
from tba_operator import attempts, naming
from tba_operator.api import (
    CONDITIONS,
    Condition,
    Images,
    Job,
    JobStatus,
    ProgressStatus,
    SearcherStatus,
    TrainerStatus,
    format_time,
    parse_status,
    parse_time,
)
from tba_operator.attempts import Course
from tba_operator.faults import Fault, searcher_set
from tba_operator.lifecycle import RESTARTING, Clock, Verdict, last_words
from tba_operator.podstate import NO_EXIT_CODE
from tba_operator.world import Observed, Pod

Truth = Literal["True", "False", "Unknown"]
_MAX_MESSAGE_CHARS = 4096
_MAX_WORDS = 1000


@dataclass(frozen=True, slots=True)
class Is:
    """What a condition says now."""

    type: str
    status: Truth
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What a pass has decided, for status to tell."""

    images: Images
    running: bool
    """Neither suspended nor waiting for its queue."""
    admitted: Is | None
    """The condition; null: no queue."""
    since: Clock
    course: Course
    trainer: TrainerStatus
    faults: Sequence[Fault]
    verdict: Verdict | None
    desired: int
    """Searchers."""
    clamped: str | None
    """Why these are fewer than were asked for."""


def compose(job: Job, observed: Observed, now: float, found: Findings) -> JobStatus:
    """The whole status."""
    before = job.status
    ended = found.verdict is not None or job.finished
    status = JobStatus(
        observed_generation=job.generation,
        start_time=before.start_time if ended else _time(found.since.started),
        completion_time=before.completion_time or (format_time(now) if found.verdict else None),
        images=found.images,
        conditions=_conditions(job, observed, now, found),
        trainer=found.trainer,
        searcher=_searcher(job, observed, found.desired),
        progress=_progress(job, observed, found),
    )
    return status.model_copy(update={"phase": _phase(job, status, found)})


def is_written(job: Job, status: JobStatus) -> bool:
    """Whether the API server holds this status already, as far as this release knows its fields."""
    dumped = status.dump()
    return job.raw_status == dumped or known_fields(JobStatus, job.raw_status) == dumped


def invalid(raw: Mapping[str, Any], message: str, now: float) -> JobStatus | None:
    """Status of a TBAJob (a manifest) that cannot be understood; null if it says so already."""
    metadata, raw_status = raw["metadata"], raw.get("status") or {}
    before = parse_status(raw_status)
    generation = metadata.get("generation", 1)
    said = [Is("Degraded", "True", "InvalidSpec", message)]
    others = [c for c in before.conditions if c.type != "Degraded"]
    status = before.model_copy(
        update={
            "observed_generation": generation,
            "conditions": _in_order([*others, *_dated(before, said, generation, now)]),
            "phase": before.phase or "Pending",
        }
    )
    return None if known_fields(JobStatus, raw_status) == status.dump() else status


def trainer_status(job: Job, observed: Observed, course: Course) -> TrainerStatus:
    """Counters and the newest pod. The last pod is still named when it is away."""
    counted = attempts.tally(job, observed, course.number)
    before, pod = job.status.trainer, course.pod
    name = pod.name if pod is not None else before.pod_name
    changes: dict[str, Any] = {
        "pod_name": name,
        "ready": _is_ready(pod),
        "restarts": before.restarts + (before.pod_name is not None and name != before.pod_name),
    }
    end = attempts.last_end(observed)
    if end is not None:
        changes |= {
            "last_exit_code": end[1].exit_code if end[1].exit_code != NO_EXIT_CODE else None,
            "last_reason": end[1].reason or None,
            "last_message": end[1].message[:_MAX_WORDS] or None,
        }
    return counted.model_copy(update=changes)


# -- conditions


def _conditions(job: Job, observed: Observed, now: float, found: Findings) -> list[Condition]:
    said = [
        _suspended(job, observed, now),
        *([found.admitted] if found.admitted is not None else []),
        _storage_ready(job, observed, found),
        _trainer_ready(job, found),
        _searchers_ready(job, observed, found),
        _degraded(job, found),
        *(_ending(job, kind, found.verdict) for kind in ("Complete", "Failed")),
    ]
    return _in_order(_dated(job.status, said, job.generation, now))


def _dated(before: JobStatus, said: Iterable[Is], generation: int, now: float) -> list[Condition]:
    """lastTransitionTime moves with `status` alone. A job's end stays as it was first told, of whatever generation the
    spec is by now: `kubectl wait` takes no word of an older one."""
    dated = []
    for now_is in said:
        known = before.condition(now_is.type)
        if known is not None and known.status == "True" and now_is.type in ("Complete", "Failed"):
            dated.append(known.model_copy(update={"observed_generation": generation}))
            continue
        since = known.last_transition_time if known is not None and known.status == now_is.status else format_time(now)
        dated.append(
            Condition(
                type=now_is.type,
                status=now_is.status,
                reason=now_is.reason,
                message=_cut(now_is.message, _MAX_MESSAGE_CHARS),
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return dated


def _in_order(conditions: Iterable[Condition]) -> list[Condition]:
    return sorted(conditions, key=lambda c: CONDITIONS.index(c.type) if c.type in CONDITIONS else len(CONDITIONS))


def _suspended(job: Job, observed: Observed, now: float) -> Is:
    if job.finished:
        return Is("Suspended", "False", "Finished", "The job is over")
    if not job.spec.suspend:
        return Is("Suspended", "False", "NotSuspended", "spec.suspend is false")
    left = living(observed, now)
    if left:
        return Is("Suspended", "False", "Suspending", f"{len(left)} pods have still to end")
    return Is("Suspended", "True", "Suspended", "No pod runs; spec.suspend: false goes on from the last checkpoint")


def living(observed: Observed, now: float) -> list[Pod]:
    """Pods that run or may run yet."""
    return [pod for pod in observed.pods if not pod.over and not attempts.is_lost(pod, observed, now)]


def _storage_ready(job: Job, observed: Observed, found: Findings) -> Is:
    fault = next((f for f in found.faults if f.reason == "StorageUnreachable"), None)
    if fault is not None:
        return Is("StorageReady", "False", fault.reason, fault.message)
    progress = attempts.voice(observed, found.course.pod)
    if progress is not None and progress.run_id:
        return Is("StorageReady", "True", "Reachable", f"The trainer works in {job.spec.storage.uri}")
    known = job.status.condition("StorageReady")
    if known is not None:
        return Is("StorageReady", known.status, known.reason, known.message)
    return Is("StorageReady", "Unknown", "NotTried", "No trainer has spoken of its storage yet")


def _trainer_ready(job: Job, found: Findings) -> Is:
    if job.finished or found.verdict is not None:
        return Is("TrainerReady", "False", "Finished", "The job is over")
    if not found.running:
        return Is("TrainerReady", "False", *_stopped(job))
    pod = found.course.pod
    if pod is not None and _is_ready(pod):
        return Is("TrainerReady", "True", "Ready", f"Pod {pod.name} is ready")
    return Is("TrainerReady", "False", RESTARTING if found.since.was_ready else "Starting", _trainer_awaits(job, found))


def _trainer_awaits(job: Job, found: Findings) -> str:
    course, pod, nodes = found.course, found.course.pod, job.spec.trainer.nodes
    if course.waits_for is not None:
        return f"Attempt {course.number} waits for {course.waits_for}"
    if pod is None:
        return f"Attempt {course.number} has no pod yet"
    if pod.over:
        return f"Pod {pod.name} ended ({last_words(found.trainer) or pod.phase}); another follows"
    if nodes > 1:
        running = sum(1 for one in (pod, *course.others) if one.phase == "Running")
        return f"Pod {pod.name} is not ready yet; {running} of {nodes} trainer pods run"
    return f"Pod {pod.name} is not ready yet"


def _searchers_ready(job: Job, observed: Observed, found: Findings) -> Is:
    ready = _searcher(job, observed, found.desired).ready_replicas
    if found.desired == 0:
        return Is("SearchersReady", "False", "NoneDesired", _why_none(job, observed, found))
    needed = min(job.spec.searcher.min_available, found.desired)
    message = f"{ready} of {found.desired} searchers are ready, {needed} are needed"
    status: Truth = "True" if ready >= needed else "False"
    if found.clamped is not None:
        return Is("SearchersReady", status, "ScaleClamped", f"{message}. {found.clamped}")
    return Is("SearchersReady", status, "Ready" if ready >= needed else "Starting", message)


def _why_none(job: Job, observed: Observed, found: Findings) -> str:
    if job.finished or found.verdict is not None:
        return "The job is over"
    if not found.running:
        return _stopped(job)[1]
    if found.clamped:
        return found.clamped
    if job.spec.trainer.colocated_searcher.enabled is True:
        return "spec.searcher.replicas is 0: the trainer has its own searcher's data alone"
    said = attempts.voice(observed, found.course.pod)
    if said is not None and said.state == "Evaluating":
        wait = f"waits up to {job.spec.sync.stall_timeout_seconds:g} s (sync.stallTimeoutSeconds)"
        return f"spec.searcher.replicas is 0: the last evaluation {wait} for a searcher to do it. Set it to 1 or more"
    return "spec.searcher.replicas is 0: the trainer has no fresh data"


def _stopped(job: Job) -> tuple[str, str]:
    """Reason and message of what is away because the job is."""
    if job.spec.suspend:
        return "Suspended", "spec.suspend is true"
    return "Queued", f"The job waits for admission by queue {job.queue}"


def _degraded(job: Job, found: Findings) -> Is:
    if job.finished or found.verdict is not None:
        return Is("Degraded", "False", "Finished", "The job is over")
    if not found.faults:
        return Is("Degraded", "False", "AsExpected", "Nothing is known to be wrong")
    first, *others = found.faults
    also = "".join(f" Also {fault.reason}: {fault.message}" for fault in others)
    return Is("Degraded", "True", first.reason, first.message + also)


def _ending(job: Job, kind: Literal["Complete", "Failed"], verdict: Verdict | None) -> Is:
    if verdict is not None and verdict.kind == kind:
        return Is(kind, "True", verdict.reason, verdict.message)
    over = verdict is not None or job.finished
    return Is(kind, "False", "Finished" if over else "NotFinished", "")


# -- the rest


def _searcher(job: Job, observed: Observed, desired: int) -> SearcherStatus:
    counts = (searcher_set(observed) or {}).get("status") or {}
    return SearcherStatus(
        replicas=counts.get("replicas") or 0,
        ready_replicas=counts.get("readyReplicas") or 0,
        updated_replicas=counts.get("updatedReplicas") or 0,
        desired_replicas=desired,
        selector=naming.selector(job.name, "searcher"),
    )


def _progress(job: Job, observed: Observed, found: Findings) -> ProgressStatus | None:
    """What the trainer says, else its last words, else what is known. Complete means all steps, whatever was heard."""
    known = job.status.progress
    said = attempts.voice(observed, found.course.pod)
    heard = said if said is not None and said.run_id else _final_word(observed, known)
    progress = _shown(heard) if heard is not None else known
    if not job.status.is_true("Complete") and not (found.verdict and found.verdict.kind == "Complete"):
        return progress
    total = job.spec.objective.total_steps
    over = {"step": total, "total_steps": total, "percentage": 100.0, "eta_seconds": 0.0}
    return (progress or ProgressStatus()).model_copy(update=over)


def _final_word(observed: Observed, known: ProgressStatus | None) -> Progress | None:
    end = attempts.last_end(observed)
    word = end[1].termination.progress if end is not None and end[1].termination is not None else None
    if word is None or not word.run_id:
        return None
    since = parse_time(known.last_updated_time) if known is not None else None
    return word if since is None or int(word.last_updated_time) >= since else None


def _shown(progress: Progress) -> ProgressStatus:
    """Rounded: digits that nobody reads are no reason for a write."""
    return ProgressStatus(
        step=progress.step,
        total_steps=progress.total_steps,
        percentage=round(progress.percentage, 1),
        policy_version=progress.policy_version,
        reward=_round(progress.reward, 4),
        eval_score=_round(progress.eval_score, 4),
        staleness_mean=_round(progress.staleness_mean, 2),
        trainer_idle_percent=_round(progress.trainer_idle_percent, 1),
        trajectories=progress.trajectories,
        replay_ratio=_round(progress.replay_ratio, 3),
        eta_seconds=_round(progress.eta_seconds, 0),
        last_updated_time=format_time(progress.last_updated_time),
    )


def _phase(job: Job, status: JobStatus, found: Findings) -> str:
    ended = next((kind for kind in ("Complete", "Failed") if status.is_true(kind)), None)
    if ended is not None:
        return ended
    if job.spec.suspend:
        return "Suspended" if status.is_true("Suspended") else "Suspending"
    if not found.running:
        return "Queued"
    pod, before = found.course.pod, job.status
    # The pod that was ready does not start again: its process has just ended, and the kubelet has yet to say so.
    ran = pod is not None and not pod.over and pod.name == before.trainer.pod_name and before.phase == "Running"
    if status.is_true("TrainerReady") or ran:
        return "Running"
    return "Pending" if pod is None or pod.phase == "Pending" else "Starting"


def _is_ready(pod: Pod | None) -> bool:
    return pod is not None and pod.ready and not pod.over and pod.deletion_deadline is None


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)
