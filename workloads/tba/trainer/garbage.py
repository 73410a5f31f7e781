"""Sweeps the bucket: reads what `tba.protocol.garbage` needs, deletes what it marks, stops when fenced.

```
latest ─► checkpoint chain ─► listings ─► snapshot manifests ─► mark ─► (re-read latest ─► delete a batch) …
```
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from tba.contracts.errors import CorruptObject, Fenced, UserError
from tba.contracts.keys import CHECKPOINTS, LATEST, MANIFEST, PINS, SHARDS, WEIGHTS
from tba.contracts.parse import parse_object
from tba.contracts.records import CheckpointManifest, Latest, ShardId, SnapshotManifest
from tba.protocol.garbage import Retention, View, garbage, kept_checkpoints
from tba.store.protocol import NotFound, ObjectInfo, ObjectStore

BATCH_KEYS = 500
"""Deleted between two looks at `latest`."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did."""

    num_objects: int
    total_bytes: int


class Guard(Protocol):
    """In whose epoch is swept: the trainer's `Committer`, or an `Onlooker`."""

    def check(self) -> Latest:
        """`latest` as it is now. Raises: Fenced once it is of another epoch; StoreUnavailable."""
        ...


class Onlooker:
    """Sweeps beside a trainer or after it, in its epoch, as long as no other takes over."""

    def __init__(self, store: ObjectStore) -> None:
        """Raises: UserError if there is no run; StoreUnavailable, CorruptObject."""
        self._store = store
        self._epoch = self._read().epoch

    def check(self) -> Latest:
        """See Guard."""
        latest = self._read()
        if latest.epoch != self._epoch:
            raise Fenced(
                f"a trainer took {self._store.uri} over, as epoch {latest.epoch}, while this swept in epoch "
                f"{self._epoch}: nothing more is deleted; sweep again if that is still wanted"
            )
        return latest

    def _read(self) -> Latest:
        try:
            return Latest.parse(self._store.get(LATEST).data)
        except NotFound:
            raise UserError(f"no run at {self._store.uri}: it has no `{LATEST}`. Check the URI") from None


class Sweeper:
    """Sweeps on request of the trainer that owns `committer`. Manifests never change, so they are read once."""

    def __init__(self, store: ObjectStore, committer: Guard) -> None:
        self._store = store
        self._committer = committer
        self._checkpoints: dict[str, CheckpointManifest] = {}
        self._snapshots: dict[str, SnapshotManifest] = {}

    def sweep(
        self,
        retention: Retention,
        *,
        references: Collection[str] = (),
        held_by: Callable[[str], Collection[ShardId]] | None = None,
        scores: Mapping[int, float] | None = None,
    ) -> Swept:
        """Delete what may go. `references`: manifest keys of reference snapshots, of now and of kept checkpoints.

        `held_by(key)`: shards that hold rows of the checkpoint at `key`, or of the live buffer for ""; without it no
        shard is deleted. `scores`: by step, of evaluations that no checkpoint may know yet.
        Raises: Fenced, before the next batch is touched; StoreUnavailable, AccessDenied.
        """
        return self._delete(self.marked(retention, references=references, held_by=held_by, scores=scores))

    def marked(
        self,
        retention: Retention,
        *,
        references: Collection[str] = (),
        held_by: Callable[[str], Collection[ShardId]] | None = None,
        scores: Mapping[int, float] | None = None,
    ) -> dict[str, int]:
        """What `sweep` would delete: key -> bytes, in its order."""
        if held_by is None:
            retention = replace(retention, delete_shards=False)
        # The live buffer before `latest`: a checkpoint that is captured but not committed yet holds no other rows.
        live = held_by("") if retention.delete_shards and held_by is not None else ()
        view = replace(self._view(retention, frozenset(references)), scores=scores or {})
        held = None
        if retention.delete_shards and held_by is not None and not view.chain_broken:
            held = {key: held_by(key) for key in kept_checkpoints(view, retention)} | {"": live}
        sizes = {o.key: o.size for o in view.objects if isinstance(o, ObjectInfo)}
        return {key: sizes[key] for key in garbage(view, retention, held)}

    def _delete(self, sizes: Mapping[str, int]) -> Swept:
        done, keys = Swept(0, 0), list(sizes)
        for start in range(0, len(keys), BATCH_KEYS):
            batch = keys[start : start + BATCH_KEYS]
            named = _named_prefixes(self._committer.check())
            going = [key for key in batch if not key.startswith(named)]
            self._store.delete(going)
            done = Swept(done.num_objects + len(going), done.total_bytes + sum(sizes[key] for key in going))
        return done

    def _view(self, retention: Retention, references: frozenset[str]) -> View:
        latest = self._committer.check()
        chain, broken = self._chain(latest.checkpoint)
        prefixes = (WEIGHTS, CHECKPOINTS, SHARDS) if retention.delete_shards else (WEIGHTS, CHECKPOINTS)
        objects = [listed for prefix in prefixes for listed in self._store.list_after(prefix)]
        pins = frozenset(
            int(name) for o in self._store.list_after(PINS) if (name := o.key.removeprefix(PINS)).isdecimal()
        )
        return View(
            latest=latest,
            chain=chain,
            snapshots=self._read_snapshots(objects),
            references=references,
            pins=pins,
            objects=objects,
            now=self._store.now(),
            chain_broken=broken,
        )

    def _chain(self, key: str | None) -> tuple[dict[str, CheckpointManifest], bool]:
        chain: dict[str, CheckpointManifest] = {}
        while key is not None and key not in chain:
            try:
                if key not in self._checkpoints:
                    self._checkpoints[key] = parse_object(CheckpointManifest, key, self._store.get(key).data)
            except NotFound:
                return chain, False  # swept before: the chain ends here
            except CorruptObject:
                return chain, True
            chain[key] = self._checkpoints[key]
            key = chain[key].parent
        self._checkpoints = dict(chain)
        return chain, False

    def _read_snapshots(self, objects: list[ObjectInfo]) -> dict[str, SnapshotManifest]:
        listed = [o.key for o in objects if o.key.startswith(WEIGHTS) and o.key.endswith(f"/{MANIFEST}")]
        found: dict[str, SnapshotManifest] = {}
        for key in listed:
            try:
                found[key] = self._snapshots.get(key) or parse_object(SnapshotManifest, key, self._store.get(key).data)
            except (NotFound, CorruptObject):
                continue  # if it is a root, nothing of weights/ is swept
        self._snapshots = found
        return found


def _named_prefixes(latest: Latest) -> tuple[str, ...]:
    keys = (latest.manifest, latest.checkpoint, latest.evaluation)
    return tuple(key.removesuffix(MANIFEST) for key in keys if key is not None)
