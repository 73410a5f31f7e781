"""`KubeApi` on a real API server: requests, their pace, and what the answers mean.

    call ─▶ may_write? ─▶ token bucket ─▶ HTTP ─▶ dict, or one of the errors of kubeapi.py

Nothing is retried here: the work queue does that. `kubernetes.aio` brings HTTP, TLS and authentication; its discovery
and its models stay out of the way.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from tba_operator.kubeapi import (
    MANAGER,
    STATUS_MANAGER,
    Access,
    ApiError,
    Conflict,
    Events,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    NotLeading,
    Object,
    QuotaExceeded,
    Resource,
    TooManyRequests,
    Unavailable,
)
from tba_operator.world import Manifest, Ref, ref_of

_READS = frozenset({"get", "list"})
_PAGE = 500
_HAS_KIND_SECONDS = 300.0
_NO_NAMESPACE = re.compile(r'namespaces "[^"]+" not found')
"""What is created where a namespace was a moment ago is answered so; an object that is not there, by its own kind."""

Observe = Callable[[str, str, str], None]
"""(verb, kind, outcome) of each request; the outcome is `ok` or the name of the error."""


@asynccontextmanager
async def connect(
    kubeconfig: Path | str | None = None,
    *,
    identity: str = "tba-operator",
    observe: Observe | None = None,
    may_write: Callable[[], bool] = lambda: True,
    rate: float = 20.0,
    burst: int = 30,
) -> AsyncIterator["ClusterApi"]:
    """The cluster that this pod runs in; with a kubeconfig, or outside of any pod, that one or the default."""
    async with ApiClient(await configuration_of(kubeconfig)) as client:
        yield ClusterApi(client, identity=identity, observe=observe, may_write=may_write, rate=rate, burst=burst)


async def configuration_of(kubeconfig: Path | str | None, *, reload_seconds: float = 60.0) -> Configuration:
    """How to reach the cluster. Credentials are read again as they change: kubelet rotates the token of a pod.

    Raises: ConfigException if this is no pod and there is no kubeconfig.
    """
    configuration = Configuration()
    if kubeconfig is None:
        try:
            config.load_incluster_config(configuration)  # reads the token again once a minute
            return configuration
        except config.ConfigException:
            pass
    path = None if kubeconfig is None else str(kubeconfig)
    await config.load_kube_config(path, client_configuration=configuration)
    loaded = time.monotonic()

    async def reload(configuration: Configuration) -> None:
        nonlocal loaded
        if time.monotonic() - loaded >= reload_seconds:
            loaded = time.monotonic()
            await config.load_kube_config(path, client_configuration=configuration)

    configuration.refresh_api_key_hook = reload  # pyright: ignore[reportAttributeAccessIssue] (typed by its default)
    return configuration


class ClusterApi:
    """Implements `KubeApi`."""

    def __init__(
        self,
        client: ApiClient,
        *,
        identity: str = "tba-operator",
        observe: Observe | None = None,
        may_write: Callable[[], bool] = lambda: True,
        timeout_seconds: float = 10.0,
        rate: float = 20.0,
        burst: int = 30,
    ) -> None:
        """`may_write` is asked right before each write save those of Leases: False raises NotLeading.

        `rate`: requests a second in the long run; `burst`: at once.
        """
        self._client = DynamicClient(client)  # not awaited: that would run its discovery
        self._observe = observe or (lambda verb, kind, outcome: None)
        self._may_write = may_write
        self._timeout = timeout_seconds
        self._bucket = TokenBucket(rate, burst, now=time.monotonic())
        self._kinds: dict[str, tuple[float, frozenset[str]]] = {}
        self._events = Events(self.create, instance=identity, clock=time.monotonic, wall=time.time)
        self.accesses: set[Access] = set()

    async def get(self, ref: Ref) -> Object | None:
        """As `KubeApi`."""
        resource = Resource.of(ref.api_version, ref.kind)
        try:
            return await self._call(
                "get", ref.kind, "get", resource.path(ref.namespace, ref.name), resource.access("get")
            )
        except NotFound:
            return None

    async def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> list[Object]:
        """As `KubeApi`. In pages: a job may have thousands of pods."""
        resource = Resource.of(api_version, kind)
        found: list[Object] = []
        page: str | None = None
        while True:
            answer = await self._call(
                "list",
                kind,
                "get",
                resource.path(namespace),
                resource.access("list"),
                label_selector=label_selector,
                field_selector=field_selector,
                limit=_PAGE,
                _continue=page,
            )
            for item in answer["items"] or []:
                found.append({"apiVersion": api_version, "kind": kind} | _trimmed(item))
            page = answer["metadata"].get("continue")
            if not page:
                return found

    async def apply(self, manifest: Manifest) -> Object:
        """As `KubeApi`."""
        resource = Resource.of(manifest["apiVersion"], manifest["kind"])
        self.accesses.add(resource.access("create"))  # an apply may create
        return await self._apply("apply", manifest, resource.access("patch"), manager=MANAGER)

    async def apply_status(self, manifest: Manifest) -> Object:
        """As `KubeApi`."""
        resource = Resource.of(manifest["apiVersion"], manifest["kind"])
        return await self._apply("apply_status", manifest, resource.access("patch", "status"), manager=STATUS_MANAGER)

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Object:
        """As `KubeApi`."""
        ref = ref_of(manifest)
        resource = Resource.of(ref.api_version, ref.kind)
        return await self._call(
            "create",
            ref.kind,
            "post",
            resource.path(ref.namespace),
            resource.access("create"),
            body=manifest,
            field_manager=MANAGER,
            dry_run="All" if dry_run else None,
        )

    async def replace(self, manifest: Manifest) -> Object:
        """As `KubeApi`."""
        return await self._replace("replace", manifest, MANAGER)

    async def replace_status(self, manifest: Manifest) -> Object:
        """As `KubeApi`."""
        return await self._replace("replace_status", manifest, STATUS_MANAGER, "status")

    async def scale(self, ref: Ref, replicas: int) -> None:
        """As `KubeApi`."""
        resource = Resource.of(ref.api_version, ref.kind)
        await self._call(
            "scale",
            ref.kind,
            "patch",
            resource.path(ref.namespace, ref.name) + "/scale",
            resource.access("patch", "scale"),
            body={"spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
            field_manager=MANAGER,
        )

    async def delete(self, ref: Ref, *, uid: str, grace_seconds: int | None = None) -> None:
        """As `KubeApi`."""
        resource = Resource.of(ref.api_version, ref.kind)
        options: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        path = resource.path(ref.namespace, ref.name)
        try:
            await self._call("delete", ref.kind, "delete", path, resource.access("delete"), body=options)
        except (NotFound, Conflict):
            return

    async def emit_event(self, regarding: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
        """As `KubeApi`."""
        await self._events.emit(regarding, kind, reason, message)

    async def has_kind(self, api_version: str, kind: str) -> bool:
        """As `KubeApi`."""
        now = time.monotonic()
        until, kinds = self._kinds.get(api_version, (now, frozenset()))
        if until <= now:
            prefix = "/apis" if "/" in api_version else "/api"
            try:
                answer = await self._call("discover", kind, "get", f"{prefix}/{api_version}", None)
            except NotFound:
                answer = {"resources": []}
            kinds = frozenset(resource["kind"] for resource in answer["resources"] or [])
            self._kinds[api_version] = (now + _HAS_KIND_SECONDS, kinds)
        return kind in kinds

    async def proxy_get(self, pod: Ref, port: int, path: str, *, limit: int = 65536, timeout: float = 2.0) -> bytes:
        """As `KubeApi`. For development outside of the cluster: the chart does not grant it."""
        resource = Resource.of(pod.api_version, pod.kind)
        target = f"{resource.path(pod.namespace, pod.name)}:{port}/proxy/{path.lstrip('/')}"
        self.accesses.add(resource.access("get", "proxy"))
        async with self._answer("proxy", pod.kind, "get", target, aiohttp.ClientTimeout(total=timeout)) as answer:
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise Invalid(f"{pod}{path}: more than {limit} bytes")
            return bytes(body)

    async def _replace(self, verb: str, manifest: Manifest, manager: str, subresource: str = "") -> Object:
        ref = ref_of(manifest)
        resource = Resource.of(ref.api_version, ref.kind)
        path = resource.path(ref.namespace, ref.name)
        return await self._call(
            verb,
            ref.kind,
            "put",
            f"{path}/{subresource}" if subresource else path,
            resource.access("update", subresource),
            body=manifest,
            field_manager=manager,
        )

    async def _apply(self, verb: str, manifest: Manifest, access: Access, *, manager: str) -> Object:
        ref = ref_of(manifest)
        path = Resource.of(ref.api_version, ref.kind).path(ref.namespace, ref.name)
        return await self._call(
            verb,
            ref.kind,
            "patch",
            path + "/status" if manager == STATUS_MANAGER else path,
            access,
            body=manifest,
            content_type="application/apply-patch+yaml",  # JSON is YAML
            field_manager=manager,
            force_conflicts=True,
        )

    async def _call(self, verb: str, kind: str, method: str, path: str, access: Access | None, **params: Any) -> Object:
        if access is not None:
            self.accesses.add(access)
        # Leases wait for nobody: a full bucket must not cost the lead.
        if kind != "Lease":
            await self._pace(verb)
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with self._answer(verb, kind, method, path, timeout, **params) as answer:
            return _trimmed(await answer.json())

    async def _pace(self, verb: str) -> None:
        wait = self._bucket.reserve(time.monotonic())
        if wait > 0:
            await asyncio.sleep(wait)
        # After the wait: leadership may have gone meanwhile.
        if verb not in _READS and verb != "discover" and not self._may_write():
            raise NotLeading(f"{verb} held back: this process holds the lease no longer")

    @asynccontextmanager
    async def _answer(
        self, verb: str, kind: str, method: str, path: str, timeout: aiohttp.ClientTimeout, **params: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            answer = await self._client.request(method, path, serialize=False, _request_timeout=timeout, **params)
            async with answer:
                yield answer
        except ApiException as error:
            told = error_of(error.status or 0, error.body or error.reason or "", dict(error.headers or {}))
            self._observe(verb, kind, type(told).__name__)
            raise told from None
        except (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError, config.ConfigException) as error:
            self._observe(verb, kind, Unavailable.__name__)
            raise Unavailable(f"{verb} {kind}: {str(error) or type(error).__name__}") from error
        self._observe(verb, kind, "ok")


class TokenBucket:
    """Paces requests: `rate` a second over time, `burst` at once."""

    def __init__(self, rate: float, burst: int, *, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._last = float(burst), now

    def reserve(self, now: float) -> float:
        """Take a token, perhaps one that is yet to come; seconds to wait before it may be used."""
        self._tokens = min(self._burst, self._tokens + (now - self._last) * self._rate) - 1
        self._last = now
        return max(0.0, -self._tokens / self._rate)


def error_of(status: int, body: str, headers: Mapping[str, str]) -> ApiError:
    """What an answer with an HTTP error status means."""
    message, causes = _told(body)
    if status == 404:
        return NamespaceTerminating(message) if _NO_NAMESPACE.fullmatch(message) else NotFound(message)
    # A uid that was given as a condition and is another's comes back as an invalid change of the uid.
    if status == 409 or any(cause.get("field") == "metadata.uid" for cause in causes):
        return Conflict(message)
    if status == 403:
        return _refused(message, causes)
    if status == 429:
        return TooManyRequests(message, _retry_after(headers))
    if status in (400, 413, 415, 422) or _is_refusal_in_disguise(message):
        return Invalid(message)
    return Unavailable(f"HTTP {status}: {message}")


def _refused(message: str, causes: Sequence[Mapping[str, str]]) -> ApiError:
    if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        return NamespaceTerminating(message)
    # "exceeded quota: …", "failed quota: …: must specify limits.cpu", "status unknown for quota: …" of a new one
    if any(words in message for words in ("exceeded quota", "failed quota", "status unknown for quota")):
        return QuotaExceeded(message)
    return Forbidden(message)


def _is_refusal_in_disguise(message: str) -> bool:
    """HTTP 500 for what the user wrote: fields unknown to or twice in server-side apply, an object too big for etcd."""
    return any(
        words in message
        for words in (
            "failed to create typed patch object",
            "duplicate entries for key",
            "field not declared in schema",
            "etcdserver: request is too large",
            "trying to send message larger than max",
        )
    )


def _told(body: str) -> tuple[str, Sequence[Mapping[str, str]]]:
    """(message, causes) of a metav1.Status; a proxy in between may answer with anything."""
    try:
        status = json.loads(body)
    except ValueError:
        return body.strip()[:1024], ()
    if not isinstance(status, dict) or not isinstance(status.get("message"), str):
        return body.strip()[:1024], ()
    return status["message"], (status.get("details") or {}).get("causes") or ()


def _retry_after(headers: Mapping[str, str]) -> float:
    given = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    return float(given) if given.isdigit() else 1.0


def _trimmed(found: Object) -> Object:
    """Without managedFields: half of an object's bytes, and nobody reads them."""
    found.get("metadata", {}).pop("managedFields", None)
    return found
