"""Does what a `Plan` says: rehearse, apply, scale, delete; then status, events. Decides only what an error means.

rehearse ─refused─▶ its workload is left out          first creation ─name is taken─▶ left out, never touched
    │                                                     │
    └──────────────▶ apply, in order ◀────────────────────┘ ──▶ scale ──▶ delete
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tba_operator.api import GROUP, KIND, ROLE_LABEL, VERSION, Job, JobStatus
from tba_operator.caches import RecentWrites, is_owned, version_of
from tba_operator.kubeapi import Conflict, Forbidden, Invalid, KubeApi, NotFound, QuotaExceeded
from tba_operator.world import ApplyError, ErrorKind, Manifest, Note, Plan, Ref, ref_of

RETRY_SECONDS: Mapping[ErrorKind, float] = {
    "InvalidPodTemplate": 600.0,  # only a new generation mends it, or a namespace's changed policy
    "QuotaExceeded": 30.0,
    "NameConflict": 5.0,  # it may be a leftover of a deleted namesake that is being collected
    "NamespaceTerminating": 30.0,
    "Forbidden": 60.0,
}
"""When to try again what was refused, unless the job's generation changes before."""
_WORKLOADS = ("Job", "StatefulSet")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error and until when the same write is not tried again."""

    error: ApplyError
    until: float
    """Unix seconds."""


@dataclass(slots=True)
class Outcome:
    """What came of a plan."""

    refusals: dict[Ref, Refusal] = field(default_factory=dict)
    accepted: dict[Ref, tuple[str, int]] = field(default_factory=dict)
    """(uid, generation) of what was applied."""
    writes: int = 0
    """Objects that changed."""


class Applier:
    """Executes plans. One for the process."""

    def __init__(self, api: KubeApi, recent: RecentWrites, *, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._recent = recent
        self._clock = clock

    async def execute(
        self, job: Job, plan: Plan, children: Mapping[Ref, Manifest], standing: Mapping[Ref, Refusal]
    ) -> Outcome:
        """Everything but status and events. `standing`: earlier refusals; theirs is not tried again yet.

        Raises: ApiError for what the queue retries: conflicts, a server that does not answer, a terminating namespace.
        """
        outcome = Outcome(self._still_standing(plan, standing))
        await self._rehearse(plan.rehearse, self._tried(plan, outcome), outcome)
        taken = await self._taken_names(job, self._tried(plan, outcome), children)
        for ref, error in taken.items():
            self._refuse(outcome, ref, error)
        await self._apply(job, plan, children, outcome)
        for scale in plan.scale:
            await self._api.scale(scale.ref, scale.replicas)
            outcome.writes += 1
        for delete in plan.delete:
            await self._api.delete(delete.ref, uid=delete.uid, grace_seconds=delete.grace_seconds)
            self._recent.drop(job.key, delete.ref)
            outcome.writes += 1
        for manifest in plan.replace_status:
            self._recent.put(job.key, await self._api.replace_status(manifest))
            outcome.writes += 1
        return outcome

    async def write_status(self, raw_job: Manifest, status: JobStatus) -> None:
        """The whole status of this very version of the job: one that was made from an older one is never written.

        A job that is gone is left alone. Raises: Conflict if it has changed meanwhile, or is a namesake.
        """
        metadata = {name: raw_job["metadata"][name] for name in ("namespace", "name", "resourceVersion")}
        manifest = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": metadata,
            "status": status.dump(),
        }
        try:
            self._recent.put((metadata["namespace"], metadata["name"]), await self._api.apply_status(manifest))
        except NotFound:
            return

    async def tell(self, raw_job: Manifest, notes: tuple[Note, ...]) -> None:
        """Events about the job."""
        for note in notes:
            await self._api.emit_event(raw_job, note.type, note.reason, note.message)

    async def delete_job(self, job: Job) -> None:
        """The TBAJob itself, and through its owner references all of its children."""
        ref = Ref(f"{GROUP}/{VERSION}", KIND, job.namespace, job.name)
        await self._api.delete(ref, uid=job.uid)

    def _still_standing(self, plan: Plan, standing: Mapping[Ref, Refusal]) -> dict[Ref, Refusal]:
        """Refusals that hold yet. A plan leaves out a workload that was refused, but nothing else that is wanted."""
        wanted = {ref_of(m) for m in plan.apply}
        return {
            ref: refusal
            for ref, refusal in standing.items()
            if refusal.until > self._clock() and (ref in wanted or ref.kind in _WORKLOADS)
        }

    def _tried(self, plan: Plan, outcome: Outcome) -> list[Manifest]:
        """What is applied, as far as is known."""
        return [m for m in plan.apply if not self._is_held(outcome, ref_of(m))]

    @staticmethod
    def _is_held(outcome: Outcome, ref: Ref) -> bool:
        refusal = outcome.refusals.get(ref)
        # A full quota refuses pods, not their workload: the StatefulSet creates them when there is room.
        return refusal is not None and refusal.error.kind != "QuotaExceeded"

    def _refuse(self, outcome: Outcome, ref: Ref, error: ApplyError) -> None:
        outcome.refusals[ref] = Refusal(error, self._clock() + RETRY_SECONDS[error.kind])

    async def _rehearse(self, pods: tuple[Manifest, ...], wanted: list[Manifest], outcome: Outcome) -> None:
        """Create pods with dry-run: a StatefulSet or Job takes any template and fails later, where nobody looks."""
        for pod in pods:
            stands_for = [ref_of(m) for m in wanted if m["kind"] in _WORKLOADS and _role(m) == _role(pod)]
            if not stands_for:
                continue
            error = await self._rehearsal_error(pod)
            if error is None:
                continue
            for ref in stands_for:
                self._refuse(outcome, ref, error)

    async def _rehearsal_error(self, pod: Manifest) -> ApplyError | None:
        try:
            await self._api.create(pod, dry_run=True)
        except Invalid as error:
            return ApplyError("InvalidPodTemplate", str(error))
        except QuotaExceeded as error:
            return ApplyError("QuotaExceeded", str(error))
        except Forbidden as error:
            # The operator's own missing permission says nothing about the pod.
            return None if "cannot create resource" in str(error) else ApplyError("InvalidPodTemplate", str(error))
        except Conflict:
            return None  # the name is taken: refused for its name only
        return None

    async def _taken_names(
        self, job: Job, wanted: list[Manifest], children: Mapping[Ref, Manifest]
    ) -> dict[Ref, ApplyError]:
        """Objects of others that have the names of what would be created: an apply would take them over."""
        unseen = [ref for ref in map(ref_of, wanted) if ref not in children]
        found = await asyncio.gather(*(self._api.get(ref) for ref in unseen))
        return {
            ref: _name_conflict(ref, raw)
            for ref, raw in zip(unseen, found, strict=True)
            if raw is not None and not is_owned(raw, job.uid)
        }

    async def _apply(self, job: Job, plan: Plan, children: Mapping[Ref, Manifest], outcome: Outcome) -> None:
        """First what pods need, all at a time; then what makes pods, unless they would start without it."""
        first = [m for m in plan.apply if m["kind"] not in _WORKLOADS]
        tried = [m for m in first if not self._is_held(outcome, ref_of(m))]
        done = await asyncio.gather(
            *(self._apply_one(job, m, children.get(ref_of(m)), outcome) for m in tried), return_exceptions=True
        )
        for error in done:
            if error is not None:
                raise error
        if any(ref_of(m) in outcome.refusals for m in first):
            return
        for manifest in plan.apply:
            ref = ref_of(manifest)
            if ref.kind in _WORKLOADS and not self._is_held(outcome, ref):
                await self._apply_one(job, manifest, children.get(ref), outcome)

    async def _apply_one(self, job: Job, manifest: Manifest, before: Manifest | None, outcome: Outcome) -> None:
        ref = ref_of(manifest)
        try:
            written = await self._api.apply(manifest)
        except Invalid as error:
            self._refuse(outcome, ref, ApplyError("InvalidPodTemplate", f"{ref}: {error}"))
        except QuotaExceeded as error:
            self._refuse(outcome, ref, ApplyError("QuotaExceeded", f"{ref}: {error}"))
        except Forbidden as error:
            self._refuse(outcome, ref, ApplyError("Forbidden", f"{ref}: {error}"))
        else:
            self._recent.put(job.key, written)
            if ref.kind not in _WORKLOADS:  # theirs is of their pods, which are created later
                outcome.refusals.pop(ref, None)
            if before is None or version_of(before) != version_of(written):
                outcome.writes += 1
            metadata = written["metadata"]
            # Kinds without one (ConfigMap, Service, ServiceAccount) would look accepted whatever becomes of them.
            if "generation" in metadata:
                outcome.accepted[ref] = (metadata["uid"], metadata["generation"])


def _role(manifest: Manifest) -> str | None:
    return (manifest["metadata"].get("labels") or {}).get(ROLE_LABEL)


def _name_conflict(ref: Ref, raw: Manifest) -> ApplyError:
    owners = [f"{o.get('kind')} {o.get('name')}" for o in raw["metadata"].get("ownerReferences") or ()]
    owner = ", ".join(owners) or "nobody"
    going = " and is being deleted" if raw["metadata"].get("deletionTimestamp") else ""
    return ApplyError(
        "NameConflict",
        f"{ref} exists, owned by {owner}{going}: delete it, or give the job another name",
    )
