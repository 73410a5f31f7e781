"""Everything a plan is made from, gathered for one job: the watches, our own recent writes, live reads of the rest."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tba_operator import kueue
from tba_operator.api import ATTEMPT_LABEL, GROUP, JOB_LABEL, KIND, VERSION, Job, parse_time
from tba_operator.caches import RECENT_SECONDS, Caches, Key, RecentWrites, is_owned, trim
from tba_operator.kubeapi import Forbidden, KubeApi
from tba_operator.podstate import STARTING, belongs_to, has_role, pod_of
from tba_operator.world import Manifest, Observed, Pod, ProgressSample, Ref, ref_of

STUCK_SECONDS = 10.0
"""A container that is still being created after this long has a reason that only events tell."""
EVENTS_SECONDS = 15.0
"""Events of a namespace are listed at most this often."""
CLUSTER_SECONDS = 60.0
"""Kueue's flavors and priority classes are read at most this often."""
CREATE_FAILURE_SECONDS = 1200.0
"""Events of failed creations stay true this long: the StatefulSet controller backs off up to 1000 s."""
STRAY_SECONDS = 30.0
"""A pod that is only waited for is looked at this often: whether its node is lost, no watch tells."""


class ProgressSource(Protocol):
    """Who reads the trainers' /progress."""

    def sample(self, key: Key, pod_uids: frozenset[str]) -> ProgressSample | None:
        """The newest answer of one of these pods."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """What a reconcile plans from, and when to look again because something is awaited that no watch tells."""

    observed: Observed
    look_again_seconds: float | None = None


@dataclass(slots=True)
class _Events:
    until: float
    """When they are listed anew, Unix seconds."""
    items: Sequence[Manifest]
    """Oldest first."""


class Observer:
    """Builds `Observed`. One for the process."""

    def __init__(
        self,
        api: KubeApi,
        caches: Caches,
        recent: RecentWrites,
        progress: ProgressSource,
        *,
        kueue: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._caches = caches
        self._recent = recent
        self._progress = progress
        self._kueue = kueue
        self._clock = clock
        self._events: dict[tuple[str, str], _Events] = {}
        self._listing: dict[tuple[str, str], asyncio.Lock] = {}
        self._cluster: dict[Ref, tuple[float, Manifest | None]] = {}

    def job(self, key: Key) -> Manifest | None:
        """The job as the watch or our last status write shows it."""
        cached = self._caches.job(key)
        if cached is None:
            return None
        found = self._recent.newest(key, _job_ref(key), cached)
        return found if found is not None and found["metadata"].get("uid") == cached["metadata"].get("uid") else cached

    def known_jobs(self) -> list[Key]:
        """Every job that the watch shows."""
        return self._caches.keys()

    async def live_job(self, key: Key) -> Manifest | None:
        """The job as it is now."""
        return await self._api.get(_job_ref(key))

    async def view(self, job: Job) -> View:
        """From the caches, with live reads of what no watch tells."""
        cached = {ref_of(raw): raw for raw in self._caches.children(job.key)}
        refs = {*cached, *self._recent.refs(job.key)} - {_job_ref(job.key)}
        newest = {ref: self._recent.newest(job.key, ref, cached.get(ref)) for ref in refs}
        unconfirmed = any(found is not None and found is not cached.get(ref) for ref, found in newest.items())
        children = {ref: found for ref, found in newest.items() if found is not None and is_owned(found, job.uid)}
        again = RECENT_SECONDS if unconfirmed else None
        return await self._completed(job, children, self._caches.pods(job.key), again)

    async def live_view(self, job: Job) -> View:
        """As `view`, with pods and trainer Jobs read from the API server now: for steps that cannot be taken back."""
        namespace, selector = job.namespace, f"{JOB_LABEL}={job.name}"
        raw_pods, raw_jobs = await asyncio.gather(
            self._api.list("v1", "Pod", namespace=namespace, label_selector=selector),
            self._api.list("batch/v1", "Job", namespace=namespace, label_selector=selector),
        )
        cached = await self.view(job)
        children = {ref: child for ref, child in cached.observed.children.items() if ref.kind != "Job"}
        for raw in raw_jobs:
            if is_owned(raw, job.uid):
                children[Ref("batch/v1", "Job", namespace, raw["metadata"]["name"])] = trim(raw)
        found = [pod_of(raw) for raw in raw_pods if has_role(raw)]
        return await self._completed(job, children, found, cached.look_again_seconds)

    async def _completed(
        self, job: Job, children: Mapping[Ref, Manifest], labelled: Sequence[Pod], again: float | None
    ) -> View:
        now = self._clock()
        pods = tuple(pod for pod in labelled if _is_of(pod, job))
        strays = tuple(p for p in labelled if p.role == "trainer" and not p.over and not _is_of(p, job))
        waits = [again] if again is not None else []
        waits += [STRAY_SECONDS] if strays else []
        pods, wait = await self._explain_stuck(job.namespace, pods, now)
        waits += [wait] if wait is not None else []
        failures, wait = await self._create_failures(job.namespace, children, pods, now)
        waits += [wait] if wait is not None else []
        trainers = frozenset(pod.uid for pod in pods if pod.role == "trainer" and pod.node_rank == 0 and not pod.over)
        observed = Observed(
            children=children,
            pods=tuple(sorted(pods, key=lambda pod: (pod.created, pod.name))),
            progress=self._progress.sample(job.key, trainers),
            strays=strays,
            not_ready_nodes=await self._not_ready_nodes((*pods, *strays), now),
            create_failures=failures,
            kueue=self._kueue,
        )
        if self._kueue and job.queue is not None:
            observed = await self._with_queue(job, observed, now)
            waits += [CLUSTER_SECONDS] if observed.denied else []
        return View(observed, min(waits, default=None))

    async def _with_queue(self, job: Job, observed: Observed, now: float) -> Observed:
        workload = next((child for ref, child in observed.children.items() if ref.kind == "Workload"), None)
        named = kueue.priority_class(job)
        flavors = {name: kueue.flavor(name) for name in kueue.flavor_names(workload)}
        found: dict[Ref, Manifest] = {}
        denied: dict[Ref, str] = {}
        for ref in [*flavors.values(), *([named] if named is not None else [])]:
            try:
                if (known := await self._of_cluster(ref, now)) is not None:
                    found[ref] = known
            except Forbidden as error:
                denied[ref] = str(error)
        return replace(
            observed,
            flavors={name: found[ref] for name, ref in flavors.items() if ref in found},
            priority_class=None if named is None else found.get(named),
            denied=denied,
        )

    async def _of_cluster(self, ref: Ref, now: float) -> Manifest | None:
        """An object that seldom changes and all jobs share; one that is not there is looked for every time.

        Raises: Forbidden if it has never been read; what is known of it is not forgotten with the right to read it.
        """
        read, known = self._cluster.get(ref, (0.0, None))
        if known is None or now - read > CLUSTER_SECONDS:
            try:
                known = await self._api.get(ref)
            except Forbidden:
                if known is None:
                    raise
            self._cluster[ref] = (now, known)
        return known

    async def _explain_stuck(
        self, namespace: str, pods: tuple[Pod, ...], now: float
    ) -> tuple[tuple[Pod, ...], float | None]:
        """Pods whose volumes cannot be mounted say only ContainerCreating; their events say why."""
        starting = [pod for pod in pods if _is_starting(pod)]
        if not starting:
            return pods, None
        stuck = {pod.uid for pod in starting if now - pod.created > STUCK_SECONDS}
        if not stuck:
            return pods, STUCK_SECONDS
        told: dict[str, str] = {}
        events = await self._list_events(namespace, "FailedMount", now)
        for event in events.items:
            told[_regarding(event).get("uid", "")] = event.get("message", "")  # oldest first: the newest stays
        explained = tuple(
            replace(pod, waiting_reason="FailedMount", waiting_message=told[pod.uid])
            if pod.uid in stuck and pod.uid in told
            else pod
            for pod in pods
        )
        return explained, events.until - now

    async def _create_failures(
        self, namespace: str, children: Mapping[Ref, Manifest], pods: tuple[Pod, ...], now: float
    ) -> tuple[tuple[str, ...], float | None]:
        """Quota and admission refuse pods with nothing but an event of the StatefulSet or Job."""
        # What failed before the newest pod was created has been mended since.
        missing = {
            child["metadata"]["uid"]: max(_newest_of(ref, pods), now - CREATE_FAILURE_SECONDS)
            for ref, child in children.items()
            if _lacks_pods(ref, child, pods)
        }
        if not missing:
            return (), None
        found: dict[str, str] = {}
        events = await self._list_events(namespace, "FailedCreate", now)
        for event in events.items:
            about = _regarding(event).get("uid", "")
            if about in missing and _event_time(event) >= missing[about]:
                found[about] = event.get("message", "")
        return tuple(sorted(set(found.values()))), events.until - now

    async def _list_events(self, namespace: str, reason: str, now: float) -> _Events:
        """Events of a namespace by reason, oldest first; one listing serves all jobs for a while."""
        place = (namespace, reason)
        async with self._listing.setdefault(place, asyncio.Lock()):
            known = self._events.get(place)
            if known is not None and now < known.until:
                return known
            try:
                items = await self._api.list("v1", "Event", namespace=namespace, field_selector=f"reason={reason}")
            except Forbidden:
                items = []  # the pods' own state still tells most
            # Of namespaces that nobody asks about any more nothing is kept.
            self._events = {of: listed for of, listed in self._events.items() if now < listed.until}
            self._listing = {of: lock for of, lock in self._listing.items() if lock.locked() or of in self._events}
            listed = self._events[place] = _Events(now + EVENTS_SECONDS, sorted(items, key=_event_time))
            return listed

    async def _not_ready_nodes(self, pods: tuple[Pod, ...], now: float) -> frozenset[str]:
        """Only of pods that should have been gone: a Node is read live, since nothing watches nodes."""
        asked = {
            pod.node for pod in pods if pod.node and pod.deletion_deadline is not None and pod.deletion_deadline < now
        }
        return frozenset([node for node in sorted(asked) if not await self._is_ready(node)])

    async def _is_ready(self, node: str) -> bool:
        try:
            found = await self._api.get(Ref("v1", "Node", "", node))
        except Forbidden:
            return True  # unknown: never force anything on a guess
        if found is None:
            return False
        conditions = (found.get("status") or {}).get("conditions") or ()
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _job_ref(key: Key) -> Ref:
    return Ref(f"{GROUP}/{VERSION}", KIND, *key)


def _is_of(pod: Pod, job: Job) -> bool:
    """A pod older than the job is a leftover of a deleted namesake; one of no workload of ours is a copy, say."""
    return pod.created >= job.created and belongs_to(pod, job.name)


def _is_starting(pod: Pod) -> bool:
    waits = pod.waiting_reason is None or pod.waiting_reason in STARTING
    return pod.phase == "Pending" and pod.node is not None and pod.deletion_deadline is None and waits


def _lacks_pods(ref: Ref, child: Manifest, pods: tuple[Pod, ...]) -> bool:
    if child["metadata"].get("deletionTimestamp"):
        return False
    if ref.kind == "StatefulSet":
        wanted = (child.get("spec") or {}).get("replicas", 1)
        return sum(1 for pod in pods if pod.role == "searcher" and not pod.over) < wanted
    if ref.kind == "Job":
        attempt = (child["metadata"].get("labels") or {}).get(ATTEMPT_LABEL)
        ended = any(
            c["type"] in ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget", "Suspended")
            and c["status"] == "True"
            for c in (child.get("status") or {}).get("conditions") or ()
        )
        had = {pod.node_rank for pod in pods if pod.role == "trainer" and str(pod.attempt) == attempt}
        return not ended and len(had) < (child.get("spec") or {}).get("completions", 1)
    return False


def _newest_of(ref: Ref, pods: tuple[Pod, ...]) -> float:
    """When the newest pod of a workload was created, Unix seconds; 0: it has none."""
    return max((pod.created for pod in pods if pod.owner == f"{ref.kind}/{ref.name}"), default=0.0)


def _regarding(event: Manifest) -> Mapping[str, Any]:
    return event.get("involvedObject") or {}


def _event_time(event: Manifest) -> float:
    """When it last happened, Unix seconds."""
    series = event.get("series") or {}
    texts = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((seconds for text in texts if (seconds := parse_time(text)) is not None), 0.0)
