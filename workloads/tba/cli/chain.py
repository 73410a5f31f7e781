"""Walk what `latest` reaches: the chain of snapshots and the chain of checkpoints, newest first. No torch."""

from collections.abc import Iterator

from tba.contracts import keys
from tba.contracts.errors import UserError
from tba.contracts.parse import parse_object
from tba.contracts.records import CheckpointManifest, Latest, SnapshotManifest
from tba.protocol.lineage import is_discarded, surviving
from tba.snapshots.manifest import fetch_manifest
from tba.store.protocol import NotFound, ObjectStore


def read_latest(store: ObjectStore) -> Latest:
    """Raises: UserError if there is no run."""
    try:
        return Latest.parse(store.get(keys.LATEST).data)
    except NotFound:
        raise UserError(f"no run at {store.uri}: it has no object `latest`. Check the URI, or start the run") from None


def snapshots(store: ObjectStore) -> Iterator[tuple[str, SnapshotManifest]]:
    """(manifest key, manifest), newest first, until the chain begins or was swept."""
    key = read_latest(store).manifest
    while key is not None:
        try:
            manifest = fetch_manifest(store, key)
        except NotFound:
            return
        yield key, manifest
        key = manifest.parent


def checkpoints(store: ObjectStore) -> Iterator[tuple[str, CheckpointManifest]]:
    """(manifest key, manifest), newest first, until the chain begins or was swept. Raises: CorruptObject."""
    key = read_latest(store).checkpoint
    while key is not None:
        try:
            data = store.get(key).data
        except NotFound:
            return
        manifest = parse_object(CheckpointManifest, key, data)
        yield key, manifest
        key = manifest.parent


def find_weights(store: ObjectStore, version: int | None) -> str:
    """Manifest key of the newest snapshot or of the newest with `version`; if that was swept, of its checkpoint.

    Raises: UserError naming the versions and steps there are.
    """
    known: list[int] = []
    for key, manifest in snapshots(store):
        if version is None or manifest.version == version:
            return key
        known.append(manifest.version)
    kept = _surviving(store, _listed(store, version)) if version is not None else []
    if kept:
        return kept[-1]
    steps = checkpoint_steps(store)
    if version in steps:
        return steps[version]
    raise UserError(
        f"no snapshot of version {version} in {store.uri}: there are {sorted(set(known)) or 'none yet'}, "
        f"and checkpoints of steps {sorted(steps) or 'none yet'}: choose one of these"
    )


def checkpoint_steps(store: ObjectStore) -> dict[int, str]:
    """Step -> manifest key of its newest checkpoint that still holds weights: the sweep may leave a bare manifest."""
    listed = {o.key for o in store.list_after(keys.CHECKPOINTS)}
    found = sorted(keys.CheckpointKey.parse(key) for key in listed if key.endswith(f"/{keys.MASTER}"))
    return {key.step: key.path for key in found if key.path in listed}


def find_assets(store: ObjectStore) -> str:
    """Manifest key of a snapshot that carries the model's configuration and tokenizer: version 0 always does."""
    for key in _listed(store, 0):
        if fetch_manifest(store, key).assets:
            return key
    raise UserError(f"{store.uri} has no snapshot of version 0 with the model's configuration: is the run complete?")


def _surviving(store: ObjectStore, snapshots: list[str]) -> list[str]:
    """Those of these manifest keys that belong to no future that a later trainer rolled back."""
    latest, newest = read_latest(store), next(checkpoints(store), None)
    lineage = surviving(newest[1] if newest is not None else None, latest.epoch)
    found = [keys.WeightsKey.parse(key) for key in snapshots]
    return [key.path for key in found if not is_discarded(lineage, key.epoch, key.version)]


def _listed(store: ObjectStore, version: int | None) -> list[str]:
    """Manifests of a version that a listing knows: for versions kept beyond a swept link of the chain."""
    prefix = f"{keys.WEIGHTS}{version or 0:010d}/"
    return [o.key for o in store.list_after(prefix) if o.key.endswith(f"/{keys.MANIFEST}")]
