"""Events about a job: what changed between two of its statuses, each told once. Pure."""

from collections.abc import Iterator

from tba_operator import naming
from tba_operator.api import Condition, Job, JobStatus
from tba_operator.faults import ORDER
from tba_operator.lifecycle import last_words
from tba_operator.world import Note


def notes(job: Job, after: JobStatus, *, scaled_by: str) -> tuple[Note, ...]:
    """Events of the way from the job's status to `after`. `scaled_by`: who decided the number of searchers."""
    return tuple(
        [
            *_of_trainer(job, after),
            *_of_searchers(job.status, after, scaled_by),
            *_of_suspension(job.status, after),
            *_of_queue(job.status, after),
            *_of_degraded(job.status.condition("Degraded"), after.condition("Degraded")),
            *_of_end(job.status, after),
        ]
    )


def _of_trainer(job: Job, after: JobStatus) -> Iterator[Note]:
    old, new = job.status.trainer.pod_name, after.trainer.pod_name
    if new is None or new == old:
        return
    attempt = after.trainer.attempt
    if old is None or not old.startswith(f"{naming.trainer_job(job.name, attempt)}-"):
        yield Note("Normal", "TrainerStarted", f"Attempt {attempt}: pod {new}")
        return
    words = last_words(after.trainer)
    yield Note("Normal", "TrainerRestarted", f"Pod {new} follows {old}" + (f", which ended: {words}" if words else ""))


def _of_searchers(before: JobStatus, after: JobStatus, scaled_by: str) -> Iterator[Note]:
    old, new = before.searcher.desired_replicas, after.searcher.desired_replicas
    if before.conditions and old != new:
        yield Note("Normal", "SearchersScaled", f"{old} → {new} by {scaled_by}")
    clamped = after.condition("SearchersReady")
    was = before.condition("SearchersReady")
    if clamped is not None and clamped.reason == "ScaleClamped" and (was is None or was.reason != clamped.reason):
        yield Note("Normal", "ScaleClamped", clamped.message)


def _of_suspension(before: JobStatus, after: JobStatus) -> Iterator[Note]:
    was, now = before.condition("Suspended"), after.condition("Suspended")
    if was is None or now is None:
        return
    if now.status == "True" and was.status != "True":
        yield Note("Normal", "Suspended", now.message)
    if now.reason == "NotSuspended" and was.reason in ("Suspending", "Suspended"):
        yield Note("Normal", "Resumed", f"Attempt {after.trainer.attempt} goes on from the last checkpoint")


def _of_queue(before: JobStatus, after: JobStatus) -> Iterator[Note]:
    was, now = before.condition("Admitted"), after.condition("Admitted")
    if now is None:
        return
    if now.status == "True" and (was is None or was.status != "True"):
        yield Note("Normal", "Admitted", now.message)
    # The end of the job is told as such, and gives the quota back in any case.
    if now.status != "True" and was is not None and was.status == "True" and now.reason != "Finished":
        yield Note("Warning", now.reason, now.message)


def _of_degraded(was: Condition | None, now: Condition | None) -> Iterator[Note]:
    if now is None:
        return
    degraded = was is not None and was.status == "True"
    if now.status == "True" and (was is None or not degraded or _rank(now) < _rank(was)):
        yield Note("Warning", now.reason, now.message)
    if now.status != "True" and was is not None and degraded and now.reason == "AsExpected":
        yield Note("Normal", "Recovered", f"{was.reason} is over")


def _of_end(before: JobStatus, after: JobStatus) -> Iterator[Note]:
    complete, failed = after.condition("Complete"), after.condition("Failed")
    if complete is not None and complete.status == "True" and not before.is_true("Complete"):
        yield Note("Normal", complete.reason, complete.message)
    if failed is not None and failed.status == "True" and not before.is_true("Failed"):
        yield Note("Warning", failed.reason, failed.message)


def _rank(condition: Condition) -> int:
    return ORDER.index(condition.reason) if condition.reason in ORDER else len(ORDER)
