"""What kopf is used for: lists and watches of jobs and their children.

    kopf: list, watch, reconnect ──▶ on.event ──▶ mirror

Only `on.event` handlers: nearly every other kind of kopf's makes it write annotations and finalizers to objects.
"""

from dataclasses import dataclass
from typing import Any, cast

import kopf

from tba_operator.api import GROUP, JOB_LABEL, KIND, PLURAL, VERSION
from tba_operator.mirror import Mirror
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


def make_registry(mirror: Mirror, streams: Streams, *, kueue: bool) -> kopf.OperatorRegistry:
    """Handlers for an embedded kopf."""
    registry = kopf.OperatorRegistry()

    async def event(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 (kopf's name for it)
        # A coroutine although it awaits nothing: kopf runs plain functions in threads.
        if type == "DELETED":
            mirror.remove(dict(body))
        else:
            mirror.show(dict(body))

    kopf.on.login(registry=registry, id="login")(streams.login)
    for kind in kinds(kueue=kueue):
        kopf.on.event(*kind.selector, registry=registry, id=f"{kind.plural}_event")(event)
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
    # An object's worker keeps its last event: at the start there is one for every object.
    settings.queueing.idle_timeout = 0.5
    # Never written by on.event handlers; not kopf's defaults, which every other kopf operator shares.
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.process.ultimate_exiting_timeout = None
    for kind in kinds(kueue=True)[1:]:
        settings.watching.label_selectors[kind.selector] = JOB_LABEL
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf copies every object with each event to find out what has changed: a sixth of all processor time."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise NotImplementedError("kopf must not write to objects")
