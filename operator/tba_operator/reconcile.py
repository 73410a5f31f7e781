"""One pass over one job.

job ─▶ view of the cluster ─▶ plan ──nothing that cannot be taken back──────────────▶ execute ─▶ status ─▶ events
                               └─a deletion, a new trainer, an end─▶ live view ─▶ plan ─▲ └errors─▶ plan ─▲
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tba_operator import log as events
from tba_operator.api import GROUP, KIND, MANAGED_BY, VERSION, InvalidJob, Job, JobStatus, parse_job
from tba_operator.apply import RETRY_SECONDS, Applier, Outcome, Refusal
from tba_operator.caches import Key, RecentWrites
from tba_operator.kubeapi import ApiError, Conflict, Forbidden, NamespaceTerminating, NotLeading, TooManyRequests
from tba_operator.log import log
from tba_operator.metrics import Metrics
from tba_operator.observe import Observer, View
from tba_operator.plan import plan as make_plan
from tba_operator.plan import plan_invalid
from tba_operator.world import ApplyError, Manifest, Note, Observed, Plan, Ref, ScalingMemory, Settings, ref_of

STALE_SECONDS = 1.0
"""Before the next pass over a job whose watch is behind."""
TRIES_BEFORE_TOLD = 5
"""Failed passes in a row, some seconds, before the job's status tells: a server that restarts is no news."""


@dataclass(slots=True)
class _Memory:
    """What is carried from one pass over a job to the next; losing it costs an apply that changes nothing."""

    uid: str
    generation: int
    refusals: dict[Ref, Refusal] = field(default_factory=dict)
    accepted: dict[Ref, tuple[str, int]] = field(default_factory=dict)
    scaling: ScalingMemory | None = None
    failures: int = 0
    """Passes in a row that the API server failed."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a plan was made of."""

    job: Job
    raw: Manifest
    view: View
    plan: Plan


class Reconciler:
    """Brings jobs to what they say. One for the process; each key by one worker at a time."""

    def __init__(
        self,
        observer: Observer,
        applier: Applier,
        recent: RecentWrites,
        *,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._observer = observer
        self._applier = applier
        self._recent = recent
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._memories: dict[Key, _Memory] = {}

    async def reconcile(self, key: Key) -> float | None:
        """One pass; seconds until the next is wanted, if nothing happens before.

        Raises: ApiError for what the queue retries.
        """
        raw = self._observer.job(key)
        if raw is None:
            self._forget(key)
            return None
        if raw["metadata"].get("deletionTimestamp") or not is_ours(raw):
            self._metrics.forget(key)
            return None
        try:
            job = parse_job(raw)
        except InvalidJob as error:
            await self._refuse(key, raw, error)
            return None
        memory = self._memory(job)
        made = self._planned(job, raw, await self._observer.view(job), memory)
        if is_consequential(made.plan, made.view.observed, job.status):
            confirmed = await self._confirmed(made)
            if confirmed is None:
                return STALE_SECONDS
            made = confirmed
        return await self._act(made, memory)

    def _planned(self, job: Job, raw: Manifest, view: View, memory: _Memory) -> _Pass:
        now = self._clock()
        errors = {ref: refusal.error for ref, refusal in memory.refusals.items() if refusal.until > now}
        observed = replace(view.observed, accepted=memory.accepted, errors=errors, scaling=memory.scaling)
        return _Pass(job, raw, replace(view, observed=observed), make_plan(job, observed, now, self._settings))

    async def _confirmed(self, made: _Pass) -> _Pass | None:
        """The same pass from live reads; null if the job is another by now."""
        raw = await self._observer.live_job(made.job.key)
        if raw is None or raw["metadata"]["uid"] != made.job.uid or raw["metadata"].get("deletionTimestamp"):
            return None
        try:
            job = parse_job(raw)
        except InvalidJob:
            return None
        return self._planned(job, raw, await self._observer.live_view(job), self._memory(job))

    async def _act(self, made: _Pass, memory: _Memory) -> float | None:
        job, observed = made.job, made.view.observed
        outcome = await self._executed(made, memory)
        memory.refusals = outcome.refusals
        memory.accepted |= outcome.accepted
        plan = made.plan
        errors = {ref: refusal.error for ref, refusal in outcome.refusals.items()}
        for error in errors.values():
            self._metrics.count_error(error.kind)
        if errors != observed.errors:
            # What could not be done belongs into the status of this very pass.
            plan = make_plan(job, replace(observed, errors=errors), self._clock(), self._settings)
        memory.scaling = plan.scaling
        if plan.status is not None:
            await self._applier.write_status(made.raw, plan.status)
        await self._applier.tell(made.raw, plan.notes)
        self._metrics.set_job(job, plan.status or job.status)
        self._report(made, plan, outcome)
        if made.plan.delete_job:
            return await self._expire(made)
        return self._next_pass(made.view, plan, outcome)

    async def _executed(self, made: _Pass, memory: _Memory) -> Outcome:
        """What came of the plan. Raises: ApiError, which is told in the job's status if it is none that soon passes."""
        for manifest in made.plan.apply:
            # Until it is applied: else what fails now would pass for the API server's own way to write it down.
            memory.accepted.pop(ref_of(manifest), None)
        try:
            outcome = await self._applier.execute(made.job, made.plan, made.view.observed.children, memory.refusals)
        except (Conflict, TooManyRequests, NamespaceTerminating, NotLeading):
            raise
        except ApiError as error:
            memory.failures += 1
            if memory.failures >= TRIES_BEFORE_TOLD:
                with suppress(ApiError):  # the first one counts, and is tried again
                    await self._tell(made, error)
            raise
        memory.failures = 0
        return outcome

    async def _tell(self, made: _Pass, error: ApiError) -> None:
        """The status as it would be, with what the API server keeps failing with."""
        job, observed = made.job, made.view.observed
        told = ApplyError("Forbidden" if isinstance(error, Forbidden) else "Unavailable", str(error))
        ref = Ref(f"{GROUP}/{VERSION}", KIND, job.namespace, job.name)
        observed = replace(observed, errors={**observed.errors, ref: told})
        plan = make_plan(job, observed, self._clock(), self._settings)
        if plan.status is not None:
            await self._applier.write_status(made.raw, plan.status)
        await self._applier.tell(made.raw, plan.notes)

    async def _expire(self, made: _Pass) -> float | None:
        """The job's time is over; seconds until that is tried again."""
        job = made.job
        try:
            await self._applier.delete_job(job)
        except Forbidden as error:
            self._metrics.count_error("Forbidden")
            message = f"The job's time to live is over, but it may not be deleted: {error}"
            log.warning(events.RECONCILE_FAILED, run=job.name, namespace=job.namespace, error=message)
            await self._applier.tell(made.raw, (Note("Warning", "Forbidden", message),))
            return RETRY_SECONDS["Forbidden"]
        return None

    def _report(self, made: _Pass, plan: Plan, outcome: Outcome) -> None:
        if not outcome.writes and plan.status is None:
            return
        status = plan.status or made.job.status
        log.info(
            events.JOB_RECONCILED,
            run=made.job.name,
            namespace=made.job.namespace,
            generation=made.job.generation,
            phase=status.phase,
            applied=len(made.plan.apply),
            scaled=len(made.plan.scale),
            deleted=len(made.plan.delete),
            refused=len(outcome.refusals),
            status_written=plan.status is not None,
        )

    def _next_pass(self, view: View, plan: Plan, outcome: Outcome) -> float | None:
        now = self._clock()
        waits = [plan.requeue_after_seconds, view.look_again_seconds]
        waits += [max(0.0, refusal.until - now) for refusal in outcome.refusals.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    async def _refuse(self, key: Key, raw: Manifest, error: InvalidJob) -> None:
        plan = plan_invalid(raw, str(error), self._clock())
        if plan.status is None:
            return
        log.warning(events.JOB_REFUSED, run=key[1], namespace=key[0], error=str(error))
        await self._applier.write_status(raw, plan.status)
        await self._applier.tell(raw, plan.notes)

    def _memory(self, job: Job) -> _Memory:
        known = self._memories.get(job.key)
        if known is None or known.uid != job.uid:
            known = self._memories[job.key] = _Memory(job.uid, job.generation)
        elif known.generation != job.generation:
            known.generation = job.generation
            known.refusals = {}  # what was refused may be mended
        return known

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._recent.forget(key)
        self._metrics.forget(key)


def is_ours(raw: Manifest) -> bool:
    """Whether this controller manages the job: `managedBy` may name another."""
    return (raw.get("spec") or {}).get("managedBy", MANAGED_BY) == MANAGED_BY


def is_consequential(plan: Plan, observed: Observed, status: JobStatus) -> bool:
    """Whether a plan has a step that cannot be taken back or is counted: never taken on a cache's word."""
    new_trainer = any(m["kind"] == "Job" and ref_of(m) not in observed.children for m in plan.apply)
    ends = plan.status is not None and any(plan.status.is_true(c) and not status.is_true(c) for c in _ENDS)
    # A status of another's object gives a queue its quota back: not while a pod uses it.
    return bool(plan.delete or plan.replace_status) or plan.delete_job or new_trainer or ends


_ENDS = ("Complete", "Failed")
