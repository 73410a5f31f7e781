"""What the controller remembers of the cluster: what the watches showed, and its own writes until they show those."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from tba_operator.api import KIND
from tba_operator.world import Manifest, Pod, Ref, ref_of

Key = tuple[str, str]
"""(namespace, name) of a job."""

RECENT_SECONDS = 10.0
"""How long an object as our own write left it is believed before a watch has confirmed it."""
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_SHARED_CHARS = 64
"""Longer strings are seldom the same in two objects."""
T = TypeVar("T")


class Index(Mapping[Key, Collection[T]], Generic[T]):
    """Objects by job. Each has one place, whatever its label said before."""

    def __init__(self) -> None:
        self._of: dict[Key, dict[str, T]] = {}
        self._keys: dict[str, Key] = {}

    def __getitem__(self, key: Key) -> Collection[T]:
        return self._of[key].values()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def put(self, key: Key, uid: str, found: T) -> None:
        """Add an object, or replace what was known of it."""
        if self._keys.get(uid, key) != key:
            self.drop(uid)
        key = sys.intern(key[0]), sys.intern(key[1])
        self._keys[uid] = key
        self._of.setdefault(key, {})[uid] = found

    def drop(self, uid: str) -> Key | None:
        """Forget an object; the job that it belonged to, if it was known."""
        key = self._keys.pop(uid, None)
        if key is not None:
            objects = self._of[key]
            del objects[uid]
            if not objects:
                del self._of[key]
        return key


class Caches:
    """What the watches hold, by job."""

    def __init__(
        self,
        jobs: Mapping[Key, Iterable[Manifest]],
        children: Mapping[Key, Iterable[Manifest]],
        pods: Mapping[Key, Iterable[Pod]],
    ) -> None:
        self._jobs = jobs
        self._children = children
        self._pods = pods

    def keys(self) -> list[Key]:
        """Every job."""
        return list(self._jobs)

    def job(self, key: Key) -> Manifest | None:
        """The job of that name; the newest, if another has just taken its place."""
        return max(self._jobs.get(key, ()), key=version_of, default=None)

    def children(self, key: Key) -> list[Manifest]:
        """Objects labelled with the job's name, pods aside."""
        return list(self._children.get(key, ()))

    def pods(self, key: Key) -> list[Pod]:
        """Pods labelled with the job's name."""
        return list(self._pods.get(key, ()))

    def keys_with_pods(self) -> list[Key]:
        """Jobs that have any."""
        return list(self._pods)

    def uids(self, kind: str) -> dict[str, Key]:
        """uid -> job of all objects of a kind."""
        if kind == "Pod":
            return {pod.uid: key for key, pods in self._pods.items() for pod in pods}
        index = self._jobs if kind == KIND else self._children
        return {_uid(raw): key for key, found in index.items() for raw in found if raw["kind"] == kind}


def _uid(raw: Manifest) -> str:
    return raw["metadata"]["uid"]


class RecentWrites:
    """Objects as our own writes left them, believed until the watch shows the same version or `RECENT_SECONDS` pass.

    Without it, a pass right after a write would plan from the state before it: a second creation, an older status.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._written: dict[Key, dict[Ref, tuple[Manifest, float]]] = {}

    def put(self, key: Key, raw: Manifest) -> None:
        """Remember an object of a job, or the job itself, that a write returned."""
        self._written.setdefault(key, {})[ref_of(raw)] = (trim(raw), self._clock() + RECENT_SECONDS)

    def drop(self, key: Key, ref: Ref) -> None:
        """Forget one that is no more."""
        self._written.get(key, {}).pop(ref, None)

    def forget(self, key: Key) -> None:
        """Forget all of a job."""
        self._written.pop(key, None)

    def refs(self, key: Key) -> list[Ref]:
        """What a job's watches may not show yet."""
        return list(self._written.get(key, ()))

    def newest(self, key: Key, ref: Ref, cached: Manifest | None) -> Manifest | None:
        """The cached object, or ours if it is newer."""
        found = self._written.get(key, {}).get(ref)
        if found is None:
            return cached
        raw, until = found
        if self._clock() > until or (cached is not None and version_of(cached) >= version_of(raw)):
            self.drop(key, ref)
            return cached
        return raw


def trim(raw: Manifest) -> dict[str, Any]:
    """An object as kept in memory: without managedFields, and pod templates of StatefulSets and Jobs.

    A template is compared by the hash in the object's annotation, so a cache of thousands need not hold it. Of a pod's
    spec only its node is left.
    """
    metadata = {k: v for k, v in raw["metadata"].items() if k not in ("managedFields", "selfLink")}
    annotations = metadata.get("annotations")
    if annotations and _LAST_APPLIED in annotations:
        metadata["annotations"] = {k: v for k, v in annotations.items() if k != _LAST_APPLIED}
    kept = {**raw, "metadata": metadata}
    kind, spec = raw.get("kind"), raw.get("spec") or {}
    if kind in ("StatefulSet", "Job"):
        kept["spec"] = {k: v for k, v in spec.items() if k not in ("template", "volumeClaimTemplates")}
    elif kind == "Pod":
        kept["spec"] = {k: v for k, v in spec.items() if k == "nodeName"}
    return _sharing(kept)


def _sharing(value: Any) -> Any:
    """A copy whose short strings are the same objects as those of others: every JSON document comes with its own."""
    if isinstance(value, Mapping):
        return {sys.intern(str(name)): _sharing(found) for name, found in value.items()}
    if isinstance(value, list | tuple):
        return [_sharing(found) for found in value]
    return sys.intern(value) if type(value) is str and len(value) <= _SHARED_CHARS else value


def version_of(raw: Manifest) -> int:
    """resourceVersion as a number: comparable within a resource (KEP-5504, GA in 1.35)."""
    text = raw["metadata"].get("resourceVersion", "")
    return int(text) if text.isdigit() else 0


def is_owned(raw: Manifest, uid: str) -> bool:
    """Whether an object belongs to the owner with that UID."""
    return any(owner.get("uid") == uid for owner in raw["metadata"].get("ownerReferences") or ())
