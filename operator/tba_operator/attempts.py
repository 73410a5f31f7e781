"""Trainer attempts: which Job is wanted, what its creation waits for, which failures count. Pure.

An attempt is one Job, `NAME-trainer-N`; `status.trainer.attempt` is the number that is wanted. If there is no Job of
that number, it is created. Whatever makes a Job unfit raises the number:

    suspended, evicted · other pod template · lost node · being deleted · fenced (exit 3)   →   N + 1

All of it is read off the Jobs and pods that are there, so a pass may be missed, repeated or made from an older view.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tba.contracts.history import Progress
from tba_operator.api import ATTEMPT_LABEL, INPUTS_ANNOTATION, Job, TrainerStatus
from tba_operator.world import Ended, Manifest, Observed, Pod, Ref

USER_ERROR = 64
FENCED = 3
UNAVAILABLE = 2
TERMINATED = 143
"""Exit codes of a trainer (interface.md §2)."""
LOST_SECONDS = 60.0
"""A pod on a NotReady node is lost when its grace period has been over for so long."""

_EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trainer Job is over."""

    reason: str
    message: str
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trainer Job that is there."""

    number: int
    ref: Ref
    uid: str
    inputs: str | None
    """Hash of what its pod template was made from."""
    failed: int
    """Counted ends of its pods so far."""
    deleting: bool
    complete: bool
    failure: Failure | None

    @property
    def over(self) -> bool:
        """It makes no more pods."""
        return self.complete or self.failure is not None


@dataclass(frozen=True, slots=True)
class Course:
    """Where the trainer stands and what is next."""

    number: int
    """The attempt that is wanted; 0: none yet."""
    current: Attempt | None
    """Its Job, if it is there."""
    waits_for: str | None
    """Why that Job may not be created now, in words."""
    drop: tuple[Attempt, ...]
    """Jobs to delete."""
    pod: Pod | None
    """Rank 0's newest of the wanted attempt; one that is not over, if there is one."""
    others: tuple[Pod, ...] = ()
    """The same of each other node of the trainer that has had a pod, by node rank."""


def attempts(observed: Observed) -> tuple[Attempt, ...]:
    """Trainer Jobs by number."""
    found = (_attempt(ref, child) for ref, child in observed.children.items() if ref.kind == "Job")
    return tuple(sorted((a for a in found if a is not None), key=lambda a: a.number))


def course(job: Job, observed: Observed, now: float, *, inputs: str | None, running: bool) -> Course:
    """The attempt that is wanted and what stands in its way.

    `inputs`: hash of today's pod template; null: none could be made now, so the one that is there is kept.
    """
    jobs = attempts(observed)
    number = _wanted(job, observed, now, inputs, running)
    current = next((a for a in jobs if a.number == number), None)
    pods = [pod for pod in trainer_pods(observed) if pod.attempt == number]
    newest = (_newest(pod for pod in pods if pod.node_rank == rank) for rank in range(1, job.spec.trainer.nodes))
    return Course(
        number=number,
        current=current,
        waits_for=None
        if current is not None
        else _waits_for(jobs, (*trainer_pods(observed), *observed.strays), observed, now),
        drop=tuple(a for a in jobs if not a.deleting and _is_dropped(a, number, running, current is not None)),
        pod=_newest(pod for pod in pods if pod.node_rank == 0),
        others=tuple(pod for pod in newest if pod is not None),
    )


def trainer_pods(observed: Observed) -> tuple[Pod, ...]:
    """All pods of trainers."""
    return tuple(pod for pod in observed.pods if pod.role == "trainer")


def leaders(observed: Observed) -> tuple[Pod, ...]:
    """Those of them with rank 0: they alone have something to say of the run."""
    return tuple(pod for pod in trainer_pods(observed) if pod.node_rank == 0)


def is_lost(pod: Pod, observed: Observed, now: float) -> bool:
    """Whether a pod will never end by itself: its node does not answer and its grace period is long over."""
    return (
        not pod.over
        and pod.deletion_deadline is not None
        and pod.deletion_deadline + LOST_SECONDS < now
        and pod.node in observed.not_ready_nodes
    )


def last_end(observed: Observed, node_rank: int = 0) -> tuple[Pod, Ended] | None:
    """How the newest trainer pod of this node rank that is over ended."""
    pods = (pod for pod in trainer_pods(observed) if pod.node_rank == node_rank)
    over = [(pod, pod.ended) for pod in pods if pod.ended is not None]
    return max(over, key=lambda end: (end[0].attempt or 0, end[0].created, end[0].name), default=None)


def voice(observed: Observed, pod: Pod | None) -> Progress | None:
    """What the trainer says of itself, if it is this very pod that speaks."""
    sample = observed.progress
    if sample is None or pod is None or pod.over or sample.progress.pod_uid != pod.uid:
        return None
    return sample.progress


def is_complete(observed: Observed) -> bool:
    """Whether a trainer has reached the end of its run."""
    return any(a.complete for a in attempts(observed)) or any(p.phase == "Succeeded" for p in leaders(observed))


def is_done(attempt: Attempt, observed: Observed) -> bool:
    """Whether it makes no more pods: rank 0's may have succeeded a moment before the Job says so."""
    succeeded = (pod.attempt for pod in leaders(observed) if pod.phase == "Succeeded")
    return attempt.over or attempt.number in succeeded


def has_worked(job: Job, observed: Observed, since: float) -> bool:
    """Whether a trainer that began after `since` (Unix seconds) shows that it was ready once, seen so or not."""
    known = job.status.progress.step if job.status.progress is not None else 0
    return any(
        said.run_id and (said.state not in ("Starting", "Failed") or said.step > known)
        for said in _words_of(observed, [pod for pod in leaders(observed) if pod.created >= int(since)])
    )


def fatal(job: Job, observed: Observed) -> Failure | None:
    """The end of the newest attempt's Job that no other attempt would mend."""
    for attempt in attempts(observed):
        failure = attempt.failure
        if failure is not None and attempt.number >= job.status.trainer.attempt and not _is_fenced(job, failure):
            return failure
    return None


def tally(job: Job, observed: Observed, wanted: int) -> TrainerStatus:
    """Counters brought up to what Jobs and pods show. Doing it again changes nothing."""
    before = job.status.trainer
    attempt, failures, seen, uid = before.attempt, before.failures, before.attempt_failures, before.attempt_uid
    for a in attempts(observed):
        if a.number < attempt:
            continue
        if a.number > attempt or a.uid != (uid or a.uid):
            attempt, seen = a.number, 0
        failures += max(0, a.failed - seen)
        seen, uid = max(a.failed, seen), a.uid or None
    if wanted > attempt:
        attempt, seen, uid = wanted, 0, None
    counted = before.model_copy(
        update={"attempt": attempt, "failures": failures, "attempt_failures": seen, "attempt_uid": uid}
    )
    step = max(_checkpoints(observed), default=None)
    if step is None or (before.checkpoint_step is not None and step <= before.checkpoint_step):
        return counted
    return counted.model_copy(update={"checkpoint_step": step, "failures_at_checkpoint": failures})


# -- reading


def _attempt(ref: Ref, child: Manifest) -> Attempt | None:
    metadata, status = child["metadata"], child.get("status") or {}
    number = (metadata.get("labels") or {}).get(ATTEMPT_LABEL, "")
    if not number.isdigit():
        return None
    true = {c["type"]: c for c in status.get("conditions") or () if c.get("status") == "True"}
    return Attempt(
        number=int(number),
        ref=ref,
        uid=metadata.get("uid", ""),
        inputs=(metadata.get("annotations") or {}).get(INPUTS_ANNOTATION),
        failed=status.get("failed") or 0,
        deleting="deletionTimestamp" in metadata,
        complete="Complete" in true or "SuccessCriteriaMet" in true,
        failure=_failure(true["Failed"]) if "Failed" in true else None,
    )


def _failure(condition: Mapping[str, Any]) -> Failure:
    message = condition.get("message", "")
    code = _EXIT_CODE.search(message) if condition.get("reason") == "PodFailurePolicy" else None
    return Failure(condition.get("reason", "Failed"), message, int(code[1]) if code else None)


def _is_fenced(job: Job, failure: Failure) -> bool:
    """Ended by a newer trainer; and the user has not said that this fails the job."""
    ruled = any(r.action == "FailJob" and FENCED in r.on_exit_codes for r in job.spec.run_policy.failure_rules)
    return failure.exit_code == FENCED and not ruled


def _checkpoints(observed: Observed) -> Iterable[int]:
    said = _words_of(observed, leaders(observed))
    return (p.checkpoint_step for p in said if p.checkpoint_step is not None)


def _words_of(observed: Observed, pods: Iterable[Pod]) -> list[Progress]:
    """What these pods say, or said last."""
    said = [voice(observed, pod) for pod in pods]
    said += [pod.ended.termination.progress for pod in pods if pod.ended and pod.ended.termination]
    return [progress for progress in said if progress is not None]


# -- deciding


def _wanted(job: Job, observed: Observed, now: float, inputs: str | None, running: bool) -> int:
    number = job.status.trainer.attempt
    if job.finished:
        return number
    for a in attempts(observed):
        if a.number >= number:
            number = a.number + 1 if _is_unfit(job, a, inputs, running) else a.number
    for pod in trainer_pods(observed):
        if not pod.over and pod.attempt is not None and pod.attempt >= number:
            number = pod.attempt + 1 if not running or is_lost(pod, observed, now) else pod.attempt
    return max(1, number) if running else number


def _is_unfit(job: Job, attempt: Attempt, inputs: str | None, running: bool) -> bool:
    if attempt.complete:
        return False
    if attempt.failure is not None:
        return not running or _is_fenced(job, attempt.failure)
    return not running or attempt.deleting or (inputs is not None and attempt.inputs != inputs)


def _waits_for(jobs: tuple[Attempt, ...], pods: tuple[Pod, ...], observed: Observed, now: float) -> str | None:
    """There is never a second trainer but beside a lost one, which the bucket's epoch fences."""
    alive = next((pod for pod in pods if not pod.over and not is_lost(pod, observed, now)), None)
    if alive is not None:
        return f"pod {alive.name} of attempt {alive.attempt} to end"
    active = next((a for a in jobs if not a.over), None)
    return f"Job {active.ref.name} to be deleted" if active is not None else None


def _is_dropped(attempt: Attempt, number: int, running: bool, replaced: bool) -> bool:
    if attempt.complete or (attempt.number == number and running):
        return False
    # Of a job that goes on, one that is over stays for its logs until the next is there.
    return not running or not attempt.over or replaced


def _newest(pods: Iterable[Pod]) -> Pod | None:
    return max(pods, key=lambda pod: (not pod.over, pod.created, pod.name), default=None)
