"""An API server in memory: `KubeApi` with the behaviour that the controller relies on, and the levers to test it.

What it does as a real one, tests/cluster/test_kubeapi_contract.py compares (support/kube_contract.py). What it lacks:
defaults, schemas, admission, controllers: tests play those with `put`, `edit`, `remove`, `fail` and `collect_garbage`.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from support.kube_merging import Path, field_paths, keyed, listed, overlaid, patched, remove_field
from support.kube_selectors import Fields, selected

from tba_operator.api import format_time
from tba_operator.kubeapi import (
    MANAGER,
    STATUS_MANAGER,
    Access,
    ApiError,
    Conflict,
    Events,
    Invalid,
    NotFound,
    Object,
    Resource,
    Unavailable,
)
from tba_operator.world import Manifest, Ref, ref_of

_WITH_STATUS = frozenset({"Job", "Node", "Pod", "PodDisruptionBudget", "Service", "StatefulSet", "TBAJob", "Workload"})
_WITH_GENERATION = frozenset(
    {"Job", "NetworkPolicy", "Pod", "PodDisruptionBudget", "StatefulSet", "TBAJob", "Workload"}
)
_IMMUTABLE = {
    "Job": ("completions", "selector", "template", "completionMode", "podFailurePolicy", "managedBy"),
    "StatefulSet": ("serviceName", "podManagementPolicy", "selector", "volumeClaimTemplates"),
}
_KUEUE = frozenset({"Workload", "ResourceFlavor", "WorkloadPriorityClass"})

_Key = tuple[str, str, str, str]


@dataclass(slots=True)
class _Failure:
    error: ApiError
    verb: str | None
    kind: str | None
    name: str | None
    times: int | None
    after: bool

    def concerns(self, verb: str, ref: Ref) -> bool:
        wanted = ((self.verb, verb), (self.kind, ref.kind), (self.name, ref.name))
        return self.times != 0 and all(mine in (None, its) for mine, its in wanted)


class FakeKube:
    """Implements `KubeApi`. All objects that it takes and gives are copies."""

    def __init__(self, *, clock: Callable[[], float] = lambda: 1_800_000_000.0, kueue: bool = False) -> None:
        """`clock`: Unix seconds, for creationTimestamp and deletionTimestamp."""
        self.writes: list[tuple[str, Ref]] = []
        """(method, object) of each write asked for, even if it changed nothing; not dry runs, not Events."""
        self.rehearsals: list[Ref] = []
        """What was tried with dry-run."""
        self.accesses: set[Access] = set()
        self.pod_answers: dict[tuple[str, str], bytes] = {}
        """(namespace, pod) -> what `proxy_get` reads."""
        self.subscribers: list[Callable[[str, Object], None]] = []
        """Called with (ADDED | MODIFIED | DELETED, object), as a watch would be."""
        self.kueue = kueue
        self._clock = clock
        self._objects: dict[_Key, Object] = {}
        self._applied: dict[tuple[_Key, str], frozenset[Path]] = {}
        self._failures: list[_Failure] = []
        self._version = 0
        self._uids = 0
        self._events = Events(self._create_event, instance="test", clock=clock, wall=clock)

    # What tests do to the cluster.

    def put(self, manifest: Manifest) -> Object:
        """Another actor writes a whole object, status and all; what the server sets is set if it is missing."""
        key = _key(ref_of(manifest))
        return self._store(key, copy.deepcopy(dict(manifest)))

    def edit(self, ref: Ref, **changes: Any) -> Object:
        """Another actor merges `metadata=…`, `spec=…`, `status=…` into an object; None removes a field."""
        return self._store(_key(ref), patched(self[ref], changes))

    def remove(self, ref: Ref) -> None:
        """An object ends: a pod's containers stopped, finalizers done."""
        self._drop(_key(ref))

    def collect_garbage(self) -> None:
        """Delete whatever has an owner that is no more, as controller-manager does."""
        while orphans := self._orphans():
            for found in orphans:
                self._delete(_key(ref_of(found)), grace=None)

    def fail(
        self,
        error: ApiError,
        *,
        verb: str | None = None,
        kind: str | None = None,
        name: str | None = None,
        times: int | None = 1,
        after: bool = False,
    ) -> None:
        """Have matching calls raise `error`; `times` None: always. `verb` is the method. `after`: done all the same."""
        self._failures.append(_Failure(error, verb, kind, name, times, after))

    def mend(self) -> None:
        """No failures any more."""
        self._failures.clear()

    def __getitem__(self, ref: Ref) -> Object:
        """Raises: KeyError if it is not there."""
        return copy.deepcopy(self._objects[_key(ref)])

    def __contains__(self, ref: Ref) -> bool:
        return _key(ref) in self._objects

    def of_kind(self, kind: str) -> list[Object]:
        """By namespace and name."""
        return [copy.deepcopy(self._objects[key]) for key in sorted(self._objects) if key[1] == kind]

    @property
    def events(self) -> list[tuple[str, str, str]]:
        """(type, reason, note) in order."""
        return [
            (e["type"], e["reason"], e["note"])
            for e in self._objects.values()
            if e["kind"] == "Event" and e["apiVersion"] == "events.k8s.io/v1"
        ]

    # KubeApi.

    async def get(self, ref: Ref) -> Object | None:
        await self._enter("get", ref, "get")
        found = None if self._is_unknown(ref.kind) else self._objects.get(_key(ref))
        return copy.deepcopy(found)

    async def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> list[Object]:
        ref = Ref(api_version, kind, namespace or "", "")
        await self._enter("list", ref, "list")
        self._check_known(kind)
        group = Resource.of(api_version, kind).group
        return [
            copy.deepcopy(self._objects[key])
            for key in sorted(self._objects)
            if key[:2] == (group, kind)
            and namespace in (None, key[2])
            and selected(label_selector, self._objects[key]["metadata"].get("labels") or {})
            and selected(field_selector, Fields(self._objects[key]))
        ]

    async def apply(self, manifest: Manifest) -> Object:
        ref = ref_of(manifest)
        body = _without_status(ref.kind, manifest)
        self.accesses.add(Resource.of(ref.api_version, ref.kind).access("create"))
        return await self._write("apply", ref, "patch", lambda old: self._merged(old, ref, body, MANAGER))

    async def apply_status(self, manifest: Manifest) -> Object:
        ref = ref_of(manifest)
        body = {k: manifest[k] for k in ("apiVersion", "kind", "status")} | {
            "metadata": {k: v for k, v in manifest["metadata"].items() if k in ("name", "namespace", "uid")}
        }

        def change(old: Object | None) -> Object:
            if old is None:
                raise _not_found(ref)
            if manifest["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                raise _modified(ref)
            return self._merged(old, ref, body, STATUS_MANAGER)

        return await self._write("apply_status", ref, "patch", change, subresource="status")

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Object:
        ref = ref_of(manifest)

        def change(old: Object | None) -> Object:
            if old is not None:
                raise Conflict(f'{ref.kind} "{ref.name}" already exists')
            return _without_status(ref.kind, manifest)

        return await self._write("create", ref, "create", change, dry_run)

    async def replace(self, manifest: Manifest) -> Object:
        ref = ref_of(manifest)

        def change(old: Object | None) -> Object:
            if old is None:
                raise _not_found(ref)
            if manifest["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                raise _modified(ref)
            new = _without_status(ref.kind, manifest)
            kept = ("uid", "creationTimestamp", "generation", "resourceVersion")
            new["metadata"] |= {k: v for k, v in old["metadata"].items() if k in kept}
            return new | ({"status": old["status"]} if ref.kind in _WITH_STATUS and "status" in old else {})

        return await self._write("replace", ref, "update", change)

    async def replace_status(self, manifest: Manifest) -> Object:
        ref = ref_of(manifest)

        def change(old: Object | None) -> Object:
            if old is None:
                raise _not_found(ref)
            if manifest["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                raise _modified(ref)
            return old | {"status": copy.deepcopy(manifest["status"])}

        return await self._write("replace_status", ref, "update", change, subresource="status")

    async def scale(self, ref: Ref, replicas: int) -> None:
        def change(old: Object | None) -> Object:
            if old is None:
                raise _not_found(ref)
            path = ("spec", "replicas")
            if old["spec"].get("replicas") != replicas:
                for (key, manager), paths in list(self._applied.items()):
                    if key == _key(ref):
                        self._applied[key, manager] = paths - {path}
            return patched(old, {"spec": {"replicas": replicas}})

        await self._write("scale", ref, "patch", change, subresource="scale")

    async def delete(self, ref: Ref, *, uid: str, grace_seconds: int | None = None) -> None:
        await self._enter("delete", ref, "delete")
        self.writes.append(("delete", ref))
        found = self._objects.get(_key(ref))
        if found is not None and found["metadata"]["uid"] == uid:
            self._delete(_key(ref), grace_seconds)
        self._raise_after("delete", ref)

    async def emit_event(self, regarding: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
        await self._events.emit(regarding, kind, reason, message)

    async def has_kind(self, api_version: str, kind: str) -> bool:
        self._raise_failure("has_kind", Ref(api_version, kind, "", ""))
        return not self._is_unknown(kind)

    async def proxy_get(self, pod: Ref, port: int, path: str, *, limit: int = 65536, timeout: float = 2.0) -> bytes:
        await self._enter("proxy_get", pod, "get", "proxy")
        body = self.pod_answers.get((pod.namespace, pod.name))
        if body is None:
            raise Unavailable(f"{pod}: no answer")
        if len(body) > limit:
            raise Invalid(f"{pod}{path}: more than {limit} bytes")
        return body

    # Inside.

    async def _enter(self, method: str, ref: Ref, verb: str, subresource: str = "") -> Resource:
        resource = Resource.of(ref.api_version, ref.kind)
        self.accesses.add(resource.access(verb, subresource))
        await asyncio.sleep(0)  # others get their turn, as with a real server
        self._raise_failure(method, ref)
        return resource

    async def _write(
        self,
        method: str,
        ref: Ref,
        verb: str,
        change: Callable[[Object | None], Object],
        dry_run: bool = False,
        subresource: str = "",
    ) -> Object:
        if not dry_run and ref.kind != "Event":
            self.writes.append((method, ref))
        await self._enter(method, ref, verb, subresource)
        self._check_known(ref.kind)
        key = _key(ref)
        old = self._objects.get(key)
        owned = dict(self._applied)
        new = change(copy.deepcopy(old))
        _check_immutable(ref.kind, old, new)
        if dry_run:
            self._applied = owned
            self.rehearsals.append(ref)
            return copy.deepcopy(new)
        stored = self._store(key, copy.deepcopy(new))
        self._raise_after(method, ref)
        return stored

    def _merged(self, old: Object | None, ref: Ref, body: Manifest, manager: str) -> Object:
        """Server-side apply: `body` over `old`, less what this manager applied before and has left out now."""
        uid = body["metadata"].get("uid")
        if uid is not None and (old is None or old["metadata"]["uid"] != uid):
            raise Conflict(f'uid mismatch: the provided object specified uid {uid} for {ref.kind} "{ref.name}"')
        key = _key(ref)
        wanted = keyed(body)
        paths = frozenset(field_paths(wanted))
        others = [owned for (k, m), owned in self._applied.items() if k == key and m != manager]
        new = keyed(old or {})
        for path in self._applied.get((key, manager), frozenset()) - paths:
            if not any(path in owned for owned in others):
                remove_field(new, path)
        self._applied[key, manager] = paths
        return listed(overlaid(new, wanted))

    def _store(self, key: _Key, new: Object) -> Object:
        old = self._objects.get(key)
        metadata = new["metadata"]
        if old is None:
            self._uids += 1
            metadata.setdefault("uid", f"uid-{self._uids}")
            metadata.setdefault("creationTimestamp", format_time(self._clock()))
            if new["kind"] in _WITH_GENERATION:
                metadata.setdefault("generation", 1)
        else:
            for name in ("uid", "creationTimestamp", "generation"):
                if name in old["metadata"]:
                    metadata.setdefault(name, old["metadata"][name])
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
            if new == old:
                return copy.deepcopy(old)
            if new["kind"] in _WITH_GENERATION and new.get("spec") != old.get("spec"):
                metadata["generation"] = old["metadata"]["generation"] + 1
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self._objects[key] = new
        held = old is not None and old["metadata"].get("finalizers")
        if "deletionTimestamp" in metadata and held and not metadata.get("finalizers"):
            self._drop(key)
            return copy.deepcopy(new)
        self._tell("MODIFIED" if old is not None else "ADDED", new)
        return copy.deepcopy(new)

    def _delete(self, key: _Key, grace: int | None) -> None:
        found = self._objects[key]
        metadata = found["metadata"]
        if metadata.get("finalizers"):
            seconds = 0
        elif found["kind"] == "Pod" and found.get("spec", {}).get("nodeName") and grace != 0:
            seconds = grace if grace is not None else found["spec"].get("terminationGracePeriodSeconds", 30)
        else:
            self._drop(key)
            return
        if "deletionTimestamp" not in metadata:
            change = {"deletionTimestamp": format_time(self._clock() + seconds), "deletionGracePeriodSeconds": seconds}
            self._store(key, patched(found, {"metadata": change}))

    def _drop(self, key: _Key) -> None:
        found = self._objects.pop(key)
        self._applied = {(k, m): paths for (k, m), paths in self._applied.items() if k != key}
        self._tell("DELETED", found)

    def _tell(self, kind: str, found: Object) -> None:
        for subscriber in self.subscribers:
            subscriber(kind, copy.deepcopy(found))

    def _orphans(self) -> tuple[Object, ...]:
        alive = {found["metadata"]["uid"] for found in self._objects.values()}
        return tuple(
            found
            for found in self._objects.values()
            if "deletionTimestamp" not in found["metadata"]
            and (owners := found["metadata"].get("ownerReferences"))
            and not any(owner["uid"] in alive for owner in owners)
        )

    def _is_unknown(self, kind: str) -> bool:
        return kind in _KUEUE and not self.kueue

    def _check_known(self, kind: str) -> None:
        if self._is_unknown(kind):
            raise NotFound("the server could not find the requested resource")

    def _raise_failure(self, method: str, ref: Ref, *, after: bool = False) -> None:
        for failure in self._failures:
            if failure.after == after and failure.concerns(method, ref):
                if failure.times is not None:
                    failure.times -= 1
                raise failure.error

    def _raise_after(self, method: str, ref: Ref) -> None:
        self._raise_failure(method, ref, after=True)

    async def _create_event(self, manifest: Manifest) -> Object:
        return await self.create(manifest)


def _key(ref: Ref) -> _Key:
    resource = Resource.of(ref.api_version, ref.kind)
    return resource.group, ref.kind, ref.namespace if resource.namespaced else "", ref.name


def _not_found(ref: Ref) -> NotFound:
    return NotFound(f'{ref.kind} "{ref.name}" not found')


def _modified(ref: Ref) -> Conflict:
    return Conflict(f'Operation cannot be fulfilled on {ref.kind} "{ref.name}": the object has been modified')


def _without_status(kind: str, manifest: Manifest) -> Object:
    copied = copy.deepcopy(dict(manifest))
    if kind in _WITH_STATUS:
        copied.pop("status", None)
    return copied


def _check_immutable(kind: str, old: Object | None, new: Object) -> None:
    for name in _IMMUTABLE.get(kind, ()) if old is not None else ():
        before, after = (old or {})["spec"].get(name), new["spec"].get(name)
        if before != after:
            raise Invalid(f'{kind} "{new["metadata"]["name"]}" is invalid: spec.{name}: field is immutable')
