"""What the controller asks of a Kubernetes API server: the `KubeApi` port, its errors, the kinds it deals with.

`ClusterApi` (cluster_api.py) is the real one; the tests' is `support.kube_fake.FakeKube`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import uuid4

import structlog

from tba_operator.api import MANAGED_BY
from tba_operator.world import Manifest, Ref, ref_of

MANAGER = "tba-operator"
STATUS_MANAGER = "tba-operator-status"

Object = dict[str, Any]


class ApiError(Exception):
    """The API server did not do it; the text is its own message."""


class NotFound(ApiError):
    """The object, its namespace or its kind is not there."""


class Conflict(ApiError):
    """Somebody was faster: other resourceVersion or uid, or the name is taken. Read again, then retry at once."""


class Invalid(ApiError):
    """Refused for what it says; the same again is refused again."""


class Forbidden(ApiError):
    """Refused by RBAC or by an admission policy such as Pod Security."""


class QuotaExceeded(ApiError):
    """A ResourceQuota leaves no room, now."""


class NamespaceTerminating(ApiError):
    """Nothing new is taken in this namespace any more: it is going, or has gone."""


class TooManyRequests(ApiError):
    """Come back after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(ApiError):
    """No answer that means anything: server error, timeout, broken connection. Nobody knows whether it was done."""


class NotLeading(ApiError):
    """A write was held back: this process no longer holds the lease."""


class KubeApi(Protocol):
    """Plain dicts in and out, without `managedFields`. Every method raises `ApiError` unless it says otherwise."""

    accesses: set["Access"]
    """Every permission that has been needed so far, for the comparison with rbac.py."""

    async def get(self, ref: Ref) -> Object | None:
        """The object; None if it, its namespace or its kind is not there."""
        ...

    async def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> list[Object]:
        """Objects of a kind; of all namespaces if none is given."""
        ...

    async def apply(self, manifest: Manifest) -> Object:
        """Server-side apply as `tba-operator`; takes fields over from others.

        Raises: Conflict if a `metadata.uid` in it is not the object's.
        """
        ...

    async def apply_status(self, manifest: Manifest) -> Object:
        """Server-side apply of `status` as `tba-operator-status`; what it applied before and not now is removed.

        Raises: Conflict if a `metadata.resourceVersion` in it is not the newest. That tells a namesake apart too: the
        server checks no uid in the status of a custom resource.
        """
        ...

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Object:
        """Make an object. Raises: Conflict if the name is taken."""
        ...

    async def replace(self, manifest: Manifest) -> Object:
        """Write a whole object. Raises: Conflict unless `metadata.resourceVersion` is the newest."""
        ...

    async def replace_status(self, manifest: Manifest) -> Object:
        """Write the whole `status` of somebody else's object. Raises: Conflict as `replace`."""
        ...

    async def scale(self, ref: Ref, replicas: int) -> None:
        """Write replicas through /scale."""
        ...

    async def delete(self, ref: Ref, *, uid: str, grace_seconds: int | None = None) -> None:
        """Remove this very object, and what it owns in the background. One that is gone, or another's: no error."""
        ...

    async def emit_event(self, regarding: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
        """An Event (`kind` Normal or Warning) about an object. The same within ten minutes is dropped. Never raises."""
        ...

    async def has_kind(self, api_version: str, kind: str) -> bool:
        """Whether the server knows it; remembered for five minutes."""
        ...

    async def proxy_get(self, pod: Ref, port: int, path: str, *, limit: int = 65536, timeout: float = 2.0) -> bytes:
        """The body of a pod's HTTP answer, through the API server. Raises: Invalid if longer than `limit` bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """One permission, as RBAC spells it."""

    group: str
    resource: str
    verb: str


_PLURALS = {
    "ConfigMap": "configmaps",
    "Event": "events",
    "Job": "jobs",
    "Lease": "leases",
    "NetworkPolicy": "networkpolicies",
    "Node": "nodes",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PriorityClass": "priorityclasses",
    "ResourceFlavor": "resourceflavors",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "StatefulSet": "statefulsets",
    "TBAJob": "tbajobs",
    "Workload": "workloads",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}
_CLUSTER_SCOPED = frozenset({"Node", "PriorityClass", "ResourceFlavor", "WorkloadPriorityClass"})


@dataclass(frozen=True, slots=True)
class Resource:
    """Where a kind lives in the API. A fixed table: with so few kinds, discovery would only add ways to fail."""

    api_version: str
    plural: str
    namespaced: bool

    @classmethod
    def of(cls, api_version: str, kind: str) -> "Resource":
        """Raises: ValueError for a kind that the controller has nothing to do with."""
        if kind not in _PLURALS:
            raise ValueError(f"kind: unknown, got {kind}; add it to _PLURALS of kubeapi.py and to rbac.py")
        return cls(api_version, _PLURALS[kind], kind not in _CLUSTER_SCOPED)

    @property
    def group(self) -> str:
        """Empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Of the collection, or of one object."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        return "/".join(parts if name is None else [*parts, name])

    def access(self, verb: str, subresource: str = "") -> Access:
        """The permission for a verb."""
        return Access(self.group, f"{self.plural}/{subresource}" if subresource else self.plural, verb)


class Events:
    """Events about objects, without repeating itself: for the implementations of `KubeApi`."""

    WINDOW_SECONDS = 600.0
    MAX_NOTE_BYTES = 1024  # the API server refuses longer ones

    def __init__(
        self,
        create: Callable[[Manifest], Awaitable[Object]],
        *,
        instance: str,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._create, self._instance, self._clock, self._wall = create, instance, clock, wall
        self._seen: dict[tuple[str, ...], float] = {}

    async def emit(self, regarding: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
        """As `KubeApi.emit_event`."""
        metadata = regarding["metadata"]
        if not self._is_new((metadata.get("uid", ""), metadata["name"], kind, reason, message)):
            return
        ref = ref_of(regarding)
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{ref.name}.{uuid4().hex[:16]}", "namespace": ref.namespace or "default"},
            "eventTime": micro_time(self._wall()),
            "type": kind,
            "reason": reason,
            "action": "Reconcile",
            "note": _shorten(message, self.MAX_NOTE_BYTES),
            "regarding": {
                "apiVersion": ref.api_version,
                "kind": ref.kind,
                "namespace": ref.namespace,
                "name": ref.name,
                "uid": metadata.get("uid", ""),
            },
            "reportingController": MANAGED_BY,
            "reportingInstance": self._instance,
        }
        try:
            await self._create(event)
        except ApiError as error:
            structlog.get_logger().warning("event_refused", regarding=str(ref), reason=reason, error=str(error))

    def _is_new(self, key: tuple[str, ...]) -> bool:
        now = self._clock()
        self._seen = {k: t for k, t in self._seen.items() if now - t < self.WINDOW_SECONDS}
        if key in self._seen:
            return False
        self._seen[key] = now
        return True


def micro_time(seconds: float) -> str:
    """Unix seconds as metav1.MicroTime."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _shorten(text: str, limit: int) -> str:
    raw = text.encode()
    return text if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "…"
