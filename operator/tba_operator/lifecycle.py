"""The ends of a job: Complete, Failed and why, by when. Pure.

A verdict is for good. It is written to status before anything is removed that it was read off: a crash in between
finds the evidence again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tba.contracts.job import RunPolicy
from tba_operator import attempts
from tba_operator.api import Job, TrainerStatus, format_time, parse_time
from tba_operator.faults import Fault
from tba_operator.world import Observed

_AGAIN = (
    "Mend the cause, delete this job and apply it again: it resumes from the newest checkpoint below "
    "storage.uri, if there is one"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ended."""

    kind: Literal["Complete", "Failed"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Clock:
    """What the deadlines run from."""

    started: float | None
    """Unix seconds; null: stopped, or waiting for its queue."""
    was_ready: bool
    """The trainer has been ready since."""


def clock(job: Job, observed: Observed, now: float, *, running: bool, ready: bool) -> Clock:
    """A job that stops loses its start; one that goes on gets another, as a batch/v1 Job does."""
    if not running:
        return Clock(None, False)
    before = job.status.condition("TrainerReady")
    was_ready = before is not None and (before.status == "True" or before.reason == RESTARTING)
    started = parse_time(job.status.start_time) or now
    # Nobody need have watched while it was ready: the controller may have been away.
    return Clock(started, ready or was_ready or attempts.has_worked(job, observed, started))


RESTARTING = "Restarting"
"""Reason of TrainerReady=False after the trainer has once been ready since startTime."""


def verdict(
    job: Job, observed: Observed, now: float, *, trainer: TrainerStatus, since: Clock, faults: Sequence[Fault]
) -> Verdict | None:
    """How the job ends now, if it does; of one that has ended, nothing new."""
    if job.finished:
        return None
    if attempts.is_complete(observed):
        return Verdict("Complete", "Completed", f"The trainer made all {job.spec.objective.total_steps} steps")
    return _of_trainer(job, observed, trainer) or _of_time(job.spec.run_policy, now, since, faults)


def deadlines(policy: RunPolicy, since: Clock) -> list[float]:
    """Unix seconds at which time alone ends the job."""
    if since.started is None:
        return []
    found = [] if since.was_ready else [since.started + policy.startup_deadline_seconds]
    if policy.active_deadline_seconds is not None:
        found.append(since.started + policy.active_deadline_seconds)
    return found


def expiry(job: Job) -> float | None:
    """Unix seconds at which a finished job is removed; null: never."""
    ttl, ended = job.spec.run_policy.ttl_seconds_after_finished, parse_time(job.status.completion_time)
    return None if ttl is None or ended is None else ended + ttl


def last_words(trainer: TrainerStatus) -> str:
    """How the trainer last ended: `exit code 137 (OOMKilled): …`."""
    if trainer.last_exit_code is None and trainer.last_reason is None:
        return ""
    code = "" if trainer.last_exit_code is None else f"exit code {trainer.last_exit_code}"
    reason = f"({trainer.last_reason})" if code and trainer.last_reason else trainer.last_reason or ""
    said = f": {trainer.last_message}" if trainer.last_message else ""
    return " ".join(part for part in (code, reason) if part) + said


def _of_trainer(job: Job, observed: Observed, trainer: TrainerStatus) -> Verdict | None:
    failure = attempts.fatal(job, observed)
    if failure is not None:
        if failure.exit_code == attempts.USER_ERROR:
            return Verdict("Failed", "UserError", f"{_said(trainer) or failure.message}. {_AGAIN}")
        reason = "FailureRule" if failure.exit_code is not None else failure.reason
        return Verdict("Failed", reason, f"{failure.message}; {_said(trainer)}".rstrip("; ") + f". {_AGAIN}")
    limit, held = job.spec.run_policy.backoff_limit, trainer.failures - trainer.failures_at_checkpoint
    if held <= limit:
        return None
    words = last_words(trainer)
    last = f"; the last with {words}" if words else ""
    return Verdict(
        "Failed",
        "BackoffLimitExceeded",
        f"The trainer failed {held} times without a new checkpoint, runPolicy.backoffLimit is {limit}{last}. {_AGAIN}",
    )


def _of_time(policy: RunPolicy, now: float, since: Clock, faults: Sequence[Fault]) -> Verdict | None:
    if since.started is None:
        return None
    active, startup = policy.active_deadline_seconds, policy.startup_deadline_seconds
    at = format_time(since.started)
    if active is not None and now >= since.started + active:
        message = f"The job ran {active} s since {at}, all that runPolicy.activeDeadlineSeconds allows. {_AGAIN}"
        return Verdict("Failed", "DeadlineExceeded", message)
    if since.was_ready or now < since.started + startup:
        return None
    cause = f": {faults[0].reason}: {faults[0].message.rstrip('.')}" if faults else ", and nothing says why"
    return Verdict(
        "Failed",
        "StartupDeadlineExceeded",
        f"The trainer was not ready {startup} s (runPolicy.startupDeadlineSeconds) after {at}{cause}. {_AGAIN}",
    )


def _said(trainer: TrainerStatus) -> str:
    return (trainer.last_message or "").rstrip(".")
