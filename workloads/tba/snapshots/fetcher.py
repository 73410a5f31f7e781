"""A searcher's way to weights: remembers the newest snapshot, so that a delta on it costs the delta alone.

    delta on what is held ──► read the deltas in between, apply them to a copy
    adapter ────────────────► read it: beside the base, which stays held, or merged into a copy of it
    anything else ──────────► anchor (+ its deltas), as `fetch_snapshot`

What was handed out is never written to. Host memory: one copy of the weights for good, two while a delta is applied.
"""

from collections.abc import Callable

from tba.contracts.errors import CorruptObject
from tba.log import SNAPSHOT_REJECTED, log
from tba.snapshots.fetch import adapt_snapshot, advance_snapshot, fetch_chain
from tba.snapshots.hostcache import HostCache
from tba.snapshots.manifest import Link, read_chain
from tba.snapshots.rebuild import verify
from tba.snapshots.snapshot import Snapshot
from tba.store.protocol import NotFound, ObjectStore

_CACHED_COPIES = 2.5  # of the weights, on disk
_SMALL_BYTES = 2**20  # headers count little, but a tiny model has little else


class SnapshotFetcher:
    """Callable as `(store, manifest_key) -> Snapshot`, by one thread at a time."""

    def __init__(
        self,
        *,
        remember: Callable[[], bool] = lambda: True,
        merge: Callable[[], bool] = lambda: True,
        cache: HostCache | None = None,
    ) -> None:
        """`remember`: whether deltas are to be expected; without them a held snapshot is memory for nothing.

        `merge`: whether adapters are to be merged; else snapshots have them beside their base.
        `cache`: shared with the other searchers of this host.
        """
        self._remember = remember
        self._merge = merge
        self._cache = cache
        self._held: Snapshot | None = None
        self._served = False

    def __call__(self, store: ObjectStore, manifest_key: str) -> Snapshot:
        """Read and verify a snapshot.

        Before anything was handed out, a delta that cannot be read is no reason to have no weights at all: the newest
        snapshot of its chain that can be read comes instead, and says so by its `key`. Later the weights in use do
        better.

        Raises: NotFound, CorruptObject: try again later, the next anchor heals for good; StoreUnavailable.
        """
        held = self._held
        if held is not None and held.key == manifest_key:
            return held
        snapshot = self._fetch(store, manifest_key, held)
        self._served = True
        if self._cache is not None:  # room for an anchor, its deltas and the next anchor
            room = int(_CACHED_COPIES * sum(t.nbytes for t in snapshot.tensors.values())) + _SMALL_BYTES
            if snapshot.manifest.encoding == "adapter" and self._held is not None:
                self._cache.touch(store.uri, self._held.manifest.files)  # what a searcher that joins late needs first
            self._cache.prune(store.uri, room)
        if snapshot.manifest.encoding == "adapter":
            return snapshot  # the next one applies to the same base
        if not self._remember():
            self._held = None
        elif self._held is None or snapshot.manifest.policy >= self._held.manifest.policy:
            self._held = snapshot  # the weights of an older evaluation are no base of what comes next
        return snapshot

    def _fetch(self, store: ObjectStore, manifest_key: str, held: Snapshot | None) -> Snapshot:
        if held is None:
            chain = read_chain(store, manifest_key)
            if chain[-1].manifest.encoding == "adapter":
                return self._adapt(store, chain)
            return fetch_chain(store, chain, accept_older=not self._served, cache=self._cache)
        try:
            chain = read_chain(store, manifest_key, held=Link(held.key, held.manifest))
            if len(chain) == 1 and chain[0].manifest.encoding == "adapter":
                if not _is_sound(held):  # merging would not notice
                    raise CorruptObject(f"{held.key}: other bytes than were read")
                return self._adapted(store, held, chain[0])
            if chain[-1].manifest.encoding == "adapter":
                return self._adapt(store, chain)
            if chain[0].manifest.base is None:
                return fetch_chain(store, chain, cache=self._cache)
            return advance_snapshot(store, held, chain, cache=self._cache)
        except (CorruptObject, NotFound) as error:
            if _is_sound(held):
                raise  # what is wrong lies in storage: the way from the anchor leads over the same objects
            log.error(SNAPSHOT_REJECTED, key=held.key, error=f"held weights changed in memory: {error}")
            self._held = None
            return self._fetch(store, manifest_key, None)

    def _adapt(self, store: ObjectStore, chain: list[Link]) -> Snapshot:
        """From version 0 on, which is held from now on."""
        self._held = fetch_chain(store, chain[:1], cache=self._cache)
        return self._adapted(store, self._held, chain[-1])

    def _adapted(self, store: ObjectStore, base: Snapshot, adapter: Link) -> Snapshot:
        found = adapt_snapshot(store, base, adapter, cache=self._cache)
        return found.merged() if self._merge() else found


def _is_sound(held: Snapshot) -> bool:
    try:
        verify(held.tensors, Link(held.key, held.manifest))
    except CorruptObject:
        return False
    return True
