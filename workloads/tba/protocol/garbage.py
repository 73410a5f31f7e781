"""Mark phase of the sweep: which keys may go (system.md "Garbage"). Pure; `tba.trainer.garbage` carries it out.

Only `weights/`, `checkpoints/` and, if asked, `shards/` are ever swept. A folder (one snapshot or checkpoint) goes when

* it is older than what `latest` names: anything else may be in flight;
* nothing roots it: `latest`, version 0, a reference, a kept or pinned checkpoint, the newest versions, a live delta;
* what superseded it has stood for the grace time by the server's clock, and so has its own newest object;
* no delta that stays builds on it.

Fallback follows `parent` and never a listing, so a checkpoint that goes leaves its small manifest behind as long as an
older kept one is reached through it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, Self

from tba.contracts.config import Storage, Sync
from tba.contracts.keys import CHECKPOINTS, MANIFEST, SHARDS, WEIGHTS, CheckpointKey, ShardKey, WeightsKey
from tba.contracts.records import CheckpointManifest, Latest, ShardId, SnapshotManifest
from tba.protocol.intervals import contains


class Listed(Protocol):
    """An object as a listing shows it; `last_modified` in seconds by the server's clock."""

    @property
    def key(self) -> str:
        """Object key."""
        ...

    @property
    def last_modified(self) -> float:
        """Unix seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep beyond the roots."""

    keep_last: int
    keep_every: int | None
    keep_best: int
    retain_versions: int
    grace_seconds: float
    delete_shards: bool = False

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.retain_versions < 1 or self.grace_seconds < 0:
            raise ValueError(f"keep_last and retain_versions must be >= 1 and grace_seconds >= 0, got {self}")

    @classmethod
    def of(cls, sync: Sync, storage: Storage) -> Self:
        """From the live settings."""
        kept = storage.checkpoints
        return cls(
            keep_last=kept.keep_last,
            keep_every=kept.keep_every,
            keep_best=kept.keep_best,
            retain_versions=sync.retain_versions,
            grace_seconds=storage.grace_seconds,
            delete_shards=storage.trajectory_retention == "UntilCheckpointed",
        )


@dataclass(frozen=True, slots=True)
class View:
    """The bucket as the sweeping trainer sees it. `latest` was read before everything else."""

    latest: Latest
    chain: Mapping[str, CheckpointManifest]
    """Manifest key -> record, from `latest.checkpoint` through the parents, newest first."""
    snapshots: Mapping[str, SnapshotManifest]
    """Manifest key -> record, for every listed snapshot manifest that can be read."""
    references: frozenset[str]
    """Manifest keys of snapshots that serve as reference policy, now or in a kept checkpoint."""
    pins: frozenset[int]
    """Steps whose checkpoints are pinned."""
    objects: Sequence[Listed]
    now: float
    """The server's clock, unix seconds."""
    scores: Mapping[int, float] = field(default_factory=dict)
    """Step -> score of evaluations that the sweeping trainer knows of; those of the chain come on top."""
    chain_broken: bool = False
    """A manifest of the chain could not be read: no checkpoint and no shard is swept."""


_Order = tuple[int, int]  # (epoch, version or step): the order in which folders were made


@dataclass(frozen=True, slots=True)
class _Folder:
    """One snapshot's or checkpoint's objects."""

    manifest: str
    order: _Order
    keys: tuple[str, ...]
    newest: float
    manifest_time: float | None


def kept_checkpoints(view: View, retention: Retention) -> list[str]:
    """Manifest keys of the checkpoints that stay, newest first: complete ones of the chain, by the rules or pinned."""
    listed = {o.key for o in view.objects}
    whole = [key for key, m in view.chain.items() if key in listed and _files(key, m) <= listed]
    steps = {key: view.chain[key].step for key in whole}
    scores = _scores(view)
    scored = [key for key in whole if key in scores]
    best = sorted(scored, key=lambda key: (-scores[key], -steps[key]))[: retention.keep_best]
    every = [k for k in whole if retention.keep_every and steps[k] % retention.keep_every == 0]
    pinned = [k for k in whole if steps[k] in view.pins]
    kept = {*whole[: retention.keep_last], *every, *best, *pinned}
    return [key for key in whole if key in kept]


def garbage(view: View, retention: Retention, held: Mapping[str, Collection[ShardId]] | None = None) -> list[str]:
    """Keys that may be deleted, manifests before what they name.

    `held`: per kept checkpoint, and under "" for the live buffer, the shards that hold a row of it; only needed to
    delete shards. Raises: ValueError if shards are to go and a kept checkpoint is missing from `held`.
    """
    keys = [key for folder in _dead_snapshots(view, retention) for key in folder.keys]
    if not view.chain_broken:
        kept = kept_checkpoints(view, retention)
        keys += _dead_checkpoint_keys(view, retention, kept)
        if retention.delete_shards and kept:
            keys += _dead_shards(view, retention, kept, held or {})
    return sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}"))


def _dead_snapshots(view: View, retention: Retention) -> Iterator[_Folder]:
    if view.latest.manifest is None:
        return
    folders = list(_folders(view.objects, WEIGHTS))
    newest = WeightsKey.parse(view.latest.manifest)
    # A snapshot beyond `latest` is not visible yet: it pushes nothing out, and nothing pushes it out.
    visible = [f for f in folders if f.order <= (newest.epoch, newest.version) and f.manifest_time is not None]
    roots = {view.latest.manifest, view.latest.evaluation, *view.references}
    roots |= {f.manifest for f in visible if f.order[1] == 0}
    dead: list[_Folder] = []
    for folder in folders:
        superseded = _nth_newer(visible, folder.order, 1 if folder.manifest_time is None else retention.retain_versions)
        if folder.manifest not in roots and _stands(view, retention, folder, superseded):
            dead.append(folder)
    read = {f.manifest for f in folders if f.manifest_time is not None or f.manifest in roots}
    needed = _bases(view, read - {f.manifest for f in dead})
    if needed is not None:
        yield from (folder for folder in dead if folder.manifest not in needed)


def _bases(view: View, staying: Collection[str]) -> set[str] | None:
    """What the deltas among `staying` build on; None if a manifest cannot be read, so that nothing is known dead.

    Somebody may yet read a delta that has its grace time still to run, so its anchor stays as long, however long ago
    that was superseded.
    """
    found: set[str] = set()
    todo = list(staying)
    while todo:
        manifest = view.snapshots.get(todo.pop())
        if manifest is None:
            return None
        if manifest.base is not None and manifest.base not in found:
            found.add(manifest.base)
            todo.append(manifest.base)
    return found


def _dead_checkpoint_keys(view: View, retention: Retention, kept: list[str]) -> Iterator[str]:
    if not kept:
        return
    folders = {f.manifest: f for f in _folders(view.objects, CHECKPOINTS)}
    reachable = [folders[key] for key in view.chain if key in folders]
    chain, scores = list(view.chain), _scores(view)
    needed = set(chain[: chain.index(kept[-1])])  # the manifests through which the oldest kept one is reached
    for folder in folders.values():
        pinned = folder.order[1] in view.pins and folder.manifest_time is not None
        if folder.manifest in kept or pinned:
            continue
        superseded = _checkpoint_superseded(view, retention, folder, reachable, scores)
        if _stands(view, retention, folder, superseded):
            yield from (k for k in folder.keys if not (k == folder.manifest and k in needed))


def _checkpoint_superseded(
    view: View, retention: Retention, folder: _Folder, reachable: Sequence[_Folder], scores: Mapping[str, float]
) -> float | None:
    if folder.manifest not in view.chain:
        return _nth_newer(reachable, folder.order, 1)
    last = _nth_newer(reachable, folder.order, retention.keep_last)
    score = scores.get(folder.manifest)
    if last is None or retention.keep_best == 0 or score is None:
        return last
    better = [f.manifest_time for f in reachable if scores.get(f.manifest, -inf) >= score and f != folder]
    times = sorted(t for t in better if t is not None)
    return max(last, times[retention.keep_best - 1]) if len(times) >= retention.keep_best else None


def _dead_shards(
    view: View, retention: Retention, kept: list[str], held: Mapping[str, Collection[ShardId]]
) -> Iterator[str]:
    missing = [key for key in (*kept, "") if key not in held]
    if missing:
        raise ValueError(f"held must name the shards of every kept checkpoint and of the live buffer, got no {missing}")
    needed = {shard_id for ids in held.values() for shard_id in ids}
    states = [view.chain[key].ingest for key in kept]
    for listed in view.objects:
        if not listed.key.startswith(SHARDS) or view.now - listed.last_modified < retention.grace_seconds:
            continue
        try:
            key = ShardKey.parse(listed.key)
        except ValueError:
            continue  # foreign: not ours to delete
        shard_id = ShardId(key.incarnation, key.seq)
        if shard_id not in needed and all(contains(state, shard_id) for state in states):
            yield listed.key


def _scores(view: View) -> dict[str, float]:
    """Manifest key -> score of the evaluation of that very step: later checkpoints know it, and the trainer itself."""
    by_step: dict[int, float] = {}
    for manifest in reversed(list(view.chain.values())):
        by_step.update(manifest.eval_scores)
    by_step.update(view.scores)
    return {key: by_step[m.step] for key, m in view.chain.items() if m.step in by_step}


def _stands(view: View, retention: Retention, folder: _Folder, superseded: float | None) -> bool:
    """Whether the folder and what superseded it are both older than the grace time."""
    return superseded is not None and view.now - max(superseded, folder.newest) >= retention.grace_seconds


def _nth_newer(folders: Sequence[_Folder], order: _Order, nth: int) -> float | None:
    """When the nth folder after `order` was complete; one (epoch, number) counts once, at its earliest."""
    times: dict[_Order, float] = {}
    for folder in folders:
        if folder.order > order and folder.manifest_time is not None:
            times[folder.order] = min(folder.manifest_time, times.get(folder.order, folder.manifest_time))
    after = sorted(times)
    return times[after[nth - 1]] if len(after) >= nth else None


def _files(key: str, manifest: CheckpointManifest) -> set[str]:
    prefix = key.removesuffix(MANIFEST)
    return {f"{prefix}{entry.name}" for entry in manifest.files}


def _folders(objects: Sequence[Listed], kind: str) -> Iterator[_Folder]:
    found: dict[str, tuple[_Order, list[Listed]]] = {}
    for listed in objects:
        if not listed.key.startswith(kind):
            continue
        try:
            manifest, order = _identify(listed.key, kind)
        except ValueError:
            continue  # foreign: not ours to delete
        found.setdefault(manifest, (order, []))[1].append(listed)
    for manifest, (order, members) in found.items():
        times = {m.key: m.last_modified for m in members}
        yield _Folder(manifest, order, tuple(times), max(times.values()), times.get(manifest))


def _identify(key: str, kind: str) -> tuple[str, _Order]:
    if kind == WEIGHTS:
        weights = WeightsKey.parse(key)
        return weights.path, (weights.epoch, weights.version)
    checkpoint = CheckpointKey.parse(key)
    return checkpoint.path, (checkpoint.epoch, checkpoint.step)
