"""The cluster as kopf's lists and watches show it, by job: what is there, and whether all of it has been seen.

    page of a list ──▶ awaited ──▶ shown, each object by its event ──▶ complete: every kind listed, nothing awaited
                          └ a later list of the kind: what it lacks, and was known before it began, is gone

kopf has indices of its own, but their readiness costs time by the square of the number of objects: with 3,000 pods
they were not complete after four minutes.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tba_operator import log as events
from tba_operator.api import JOB_LABEL, KIND
from tba_operator.caches import Caches, Index, Key, trim
from tba_operator.log import log
from tba_operator.podstate import has_role, pod_of
from tba_operator.world import Manifest, Pod

_WISHES = ("uid", "generation", "labels", "deletionTimestamp")
SETTLE_SECONDS = 0.2
"""Pods start and end in crowds, and a status is written after each look: what comes within this time is one look."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one list and its watch are of."""

    kind: str
    namespace: str | None
    """null: all."""


@dataclass(slots=True)
class _Listing:
    """A list of which some pages have been read."""

    before: frozenset[str]
    """uids that were known when it began."""
    seen: set[str] = field(default_factory=set)


class Mirror:
    """Filled by kopf's handlers, read through `caches`."""

    def __init__(self, streams: Mapping[str, Stream], wake: Callable[[Key, float], None]) -> None:
        """`streams`: all that will be listed, by the name in `streams.stream_of`.

        `wake` is called with each job that something happened to and how many seconds that may wait, from completeness
        on; then with every job.
        """
        self._streams = streams
        self._wake = wake
        self._jobs: Index[Manifest] = Index()
        self._children: Index[Manifest] = Index()
        self._pods: Index[Pod] = Index()
        self._unlisted = set(streams)
        self._awaited: set[str] = set()
        self._listings: dict[str, _Listing] = {}
        self.caches = Caches(self._jobs, self._children, self._pods)
        self.complete = asyncio.Event()

    def show(self, raw: Manifest) -> None:
        """An object is there, or has changed."""
        uid, key = raw["metadata"]["uid"], key_of(raw)
        before = self.caches.job(key) if key is not None and raw["kind"] == KIND else None
        try:
            if key is not None:
                self._put(key, uid, raw)
            else:
                self._drop(uid)
        finally:
            # Also one that cannot be read: the others wait for it.
            self._handled(uid, key, 0.0 if is_wish(before, raw) else SETTLE_SECONDS)

    def remove(self, raw: Manifest) -> None:
        """An object was deleted."""
        uid = raw["metadata"]["uid"]
        self._drop(uid)
        self._handled(uid, key_of(raw), SETTLE_SECONDS)

    def page(self, stream: str, uids: Iterable[str], *, first: bool, last: bool) -> None:
        """A page of a list was read; the events of its objects follow."""
        of = self._streams.get(stream)
        if of is None:
            return
        if first:
            self._listings[stream] = _Listing(self._known(of))
        listing = self._listings.get(stream)
        if listing is None:
            return
        seen = set(uids)
        listing.seen |= seen
        if not self.complete.is_set():
            self._awaited |= seen
        if last:
            del self._listings[stream]
            self._unlisted.discard(stream)
            self._bury(of, listing.before - listing.seen)
            self._check()

    def _put(self, key: Key, uid: str, raw: Manifest) -> None:
        if raw["kind"] == KIND:
            self._jobs.put(key, uid, trim(raw))
        elif raw["kind"] != "Pod":
            self._children.put(key, uid, trim(raw))
        elif has_role(raw):
            self._pods.put(key, uid, pod_of(trim(raw)))

    def _drop(self, uid: str) -> Key | None:
        return next((key for index in self._indices if (key := index.drop(uid)) is not None), None)

    @property
    def _indices(self) -> tuple[Index[Manifest], Index[Manifest], Index[Pod]]:
        return self._jobs, self._children, self._pods

    def _known(self, of: Stream) -> frozenset[str]:
        found = self.caches.uids(of.kind).items()
        return frozenset(uid for uid, key in found if of.namespace in (None, key[0]))

    def _bury(self, of: Stream, gone: frozenset[str]) -> None:
        """Deleted while no watch was open: nobody will ever say so."""
        if not gone:
            return
        log.warning(events.OBJECTS_VANISHED, kind=of.kind, count=len(gone))
        for uid in gone:
            key = self._drop(uid)
            if key is not None and self.complete.is_set():
                self._wake(key, 0.0)

    def _handled(self, uid: str, key: Key | None, may_wait: float) -> None:
        if self.complete.is_set():
            if key is not None:
                self._wake(key, may_wait)
            return
        self._awaited.discard(uid)
        self._check()

    def _check(self) -> None:
        if self._unlisted or self._awaited or self.complete.is_set():
            return
        self.complete.set()
        for key in list(self._jobs):
            self._wake(key, 0.0)


def key_of(raw: Manifest) -> Key | None:
    """The job that an object is, or belongs to by its label."""
    metadata = raw["metadata"]
    name = metadata["name"] if raw["kind"] == KIND else (metadata.get("labels") or {}).get(JOB_LABEL)
    return None if name is None else (metadata["namespace"], name)


def is_wish(before: Manifest | None, raw: Manifest) -> bool:
    """Whether somebody wants a job to be another than before: more than its status has changed."""
    if raw["kind"] != KIND:
        return False
    return before is None or any(before["metadata"].get(name) != raw["metadata"].get(name) for name in _WISHES)
