"""What kopf is used for: lists and watches of jobs and their children, kept in indices, and a wake-up for each event.

    kopf: list, watch, reconnect ──▶ index (trimmed) ──▶ on.event ──▶ wake(namespace, job)

Only `on.event` and `index` handlers: every other kind of kopf's makes it write annotations and finalizers to objects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kopf

from tba_operator.api import GROUP, JOB_LABEL, KIND, PLURAL, VERSION
from tba_operator.caches import Caches, Key, trim
from tba_operator.podstate import has_role, pod_of
from tba_operator.streams import SERVER_TIMEOUT_SECONDS, Streams


@dataclass(frozen=True, slots=True)
class Kind:
    """A resource to watch."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def selector(self) -> tuple[str, str, str] | tuple[str, str]:
        """As kopf takes it."""
        return (self.group, self.version, self.plural) if self.group else (self.version, self.plural)


JOBS = Kind(GROUP, VERSION, PLURAL, KIND)
PODS = Kind("", "v1", "pods", "Pod")
CHILDREN = (
    Kind("batch", "v1", "jobs", "Job"),
    Kind("apps", "v1", "statefulsets", "StatefulSet"),
    Kind("", "v1", "configmaps", "ConfigMap"),
    Kind("", "v1", "services", "Service"),
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
)
WORKLOADS = Kind("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
"""Watched only where Kueue is installed."""
REQUEST_BACKOFFS = (0.2, 0.5, 1, 2, 5, 10, 10, 20, 30, 30, 30)
"""Seconds between tries of kopf's own requests: over two minutes, then kopf ends and the process with it."""


def kinds(*, kueue: bool) -> tuple[Kind, ...]:
    """All that is watched."""
    return (JOBS, PODS, *CHILDREN, *((WORKLOADS,) if kueue else ()))


def make_registry(
    wake: Callable[[Key], None], streams: Streams, started: Callable[[Caches], None], *, kueue: bool
) -> kopf.OperatorRegistry:
    """Handlers for an embedded kopf. `started` gets the indices, still empty; complete from the first `wake` on."""
    registry = kopf.OperatorRegistry()

    async def hand_out(jobs: kopf.Index, children: kopf.Index, pods: kopf.Index, **_: Any) -> None:
        started(Caches(jobs, children, pods))

    async def job_event(body: kopf.Body, **_: Any) -> None:
        wake(_own_key(body))

    async def child_event(body: kopf.Body, **_: Any) -> None:
        wake(_key_of_label(body))

    kopf.on.login(registry=registry, id="login")(streams.login)
    kopf.on.startup(registry=registry, id="hand_out")(hand_out)
    kopf.on.event(*JOBS.selector, registry=registry, id="job_event")(job_event)
    kopf.index(*JOBS.selector, registry=registry, id="jobs")(_index_job)
    labels = {JOB_LABEL: kopf.PRESENT}
    for child in kinds(kueue=kueue)[1:]:
        kopf.on.event(*child.selector, registry=registry, id=f"{child.plural}_event", labels=labels)(child_event)
        index = ("pods", _index_pod) if child == PODS else ("children", _index_child)
        kopf.index(*child.selector, registry=registry, id=index[0], labels=labels)(index[1])
    return registry


def kopf_settings() -> kopf.OperatorSettings:
    """Watches only, with selectors applied by the server, and finite waits everywhere."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = REQUEST_BACKOFFS
    # Never written by on.event and index handlers; not kopf's defaults, which every other kopf operator shares.
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.process.ultimate_exiting_timeout = None
    for kind in kinds(kueue=True)[1:]:
        settings.watching.label_selectors[kind.selector] = JOB_LABEL
    return settings


# Coroutines although they await nothing: kopf runs plain functions in threads.


async def _index_job(body: kopf.Body, **_: Any) -> dict[Key, Any]:
    return {_own_key(body): trim(dict(body))}


async def _index_child(body: kopf.Body, **_: Any) -> dict[Key, Any]:
    return {_key_of_label(body): trim(dict(body))}


async def _index_pod(body: kopf.Body, **_: Any) -> dict[Key, Any] | None:
    return {_key_of_label(body): pod_of(body)} if has_role(body) else None


def _own_key(body: kopf.Body) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _key_of_label(body: kopf.Body) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["labels"][JOB_LABEL]
