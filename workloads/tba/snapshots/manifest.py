"""Reads a snapshot's manifest and checks that it is the one its key names; follows deltas and adapters down."""

from dataclasses import dataclass

from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey
from tba.contracts.parse import parse_object
from tba.contracts.records import SnapshotManifest
from tba.hashing import xxh3_128
from tba.store.protocol import NotFound, ObjectStore


@dataclass(frozen=True, slots=True)
class Link:
    """A snapshot of a chain."""

    key: str  # of the manifest
    manifest: SnapshotManifest


def fetch_manifest(store: ObjectStore, manifest_key: str) -> SnapshotManifest:
    """Read and check a manifest. Raises: NotFound; CorruptObject; ValueError if `manifest_key` is no manifest key."""
    key = WeightsKey.parse(manifest_key)
    if key.path != manifest_key:
        raise ValueError(f"not a manifest key: {manifest_key!r}, expected {key.path!r}")
    manifest = parse_object(SnapshotManifest, manifest_key, store.get(manifest_key).data)
    found = WeightsKey(manifest.version, manifest.epoch, manifest.nonce)
    if found != key:
        raise CorruptObject(f"{manifest_key}: holds the manifest of {found.path}")
    for kind, names in (
        ("file", [f.name for f in [*manifest.files, *manifest.assets]]),
        ("tensor", [t.name for t in manifest.tensors]),
    ):
        if len(set(names)) != len(names):
            raise CorruptObject(f"{manifest_key}: names a {kind} twice")
    homeless = {t.file for t in manifest.tensors} - {f.name for f in manifest.files}
    if homeless:
        raise CorruptObject(f"{manifest_key}: places tensors in {sorted(homeless)}, which it does not list")
    _check_base(manifest_key, manifest)
    return manifest


def read_chain(store: ObjectStore, manifest_key: str, *, held: Link | None = None) -> list[Link]:
    """What must be read for a snapshot, oldest first: an anchor and the deltas on it.

    The chain begins behind `held` where it leads there, else with the anchor. Each step back lowers the depth, so the
    way ends. Raises: NotFound; CorruptObject if a base is missing or not the one that the delta was made from.
    """
    chain = [Link(manifest_key, fetch_manifest(store, manifest_key))]
    while (base := chain[-1].manifest.base) is not None:
        if held is not None and held.key == base:
            _check_step(held, chain[-1])
            break
        try:
            below = Link(base, fetch_manifest(store, base))
        except NotFound as error:
            raise CorruptObject(f"{manifest_key}: its chain needs {base}, which is missing") from error
        _check_step(below, chain[-1])
        chain.append(below)
    return chain[::-1]


def weights_hash(manifest: SnapshotManifest) -> str:
    """One digest of all tensors: equal if and only if (but for collisions) the weights are equal bit for bit."""
    lines = sorted(f"{t.name}\0{t.dtype}\0{t.shape}\0{t.hash}\n" for t in manifest.tensors)
    return xxh3_128("".join(lines).encode())


def _check_base(manifest_key: str, manifest: SnapshotManifest) -> None:
    builds, adapts = manifest.encoding != "full", manifest.encoding == "adapter"
    if (
        not (builds == (manifest.base is not None) == (manifest.base_hash is not None) == (manifest.depth > 0))
        or adapts != (manifest.scale is not None)
        or (adapts and manifest.depth != 1)
    ):
        raise CorruptObject(
            f"{manifest_key}: a {manifest.encoding} snapshot with base {manifest.base!r}, base hash "
            f"{manifest.base_hash!r}, depth {manifest.depth} and scale {manifest.scale}"
        )
    if manifest.base is None:
        return
    try:
        base = WeightsKey.parse(manifest.base)
    except ValueError as error:
        raise CorruptObject(f"{manifest_key}: its base is {manifest.base!r}: {error}") from error
    # An adapter's base is version 0, of whatever epoch.
    if base.path != manifest.base or (base.epoch != manifest.epoch and not adapts):
        raise CorruptObject(f"{manifest_key}: its base is {manifest.base!r}, not a manifest of epoch {manifest.epoch}")


def _check_step(base: Link, delta: Link) -> None:
    if delta.manifest.depth != base.manifest.depth + 1:
        raise CorruptObject(
            f"{delta.key}: depth {delta.manifest.depth} on {base.key}, which has depth {base.manifest.depth}"
        )
    found = weights_hash(base.manifest)
    if found != delta.manifest.base_hash:
        raise CorruptObject(f"{delta.key}: made from weights {delta.manifest.base_hash}, {base.key} has {found}")
    if delta.manifest.encoding == "adapter":
        return
    shapes = [{t.name: (t.dtype, t.shape) for t in link.manifest.tensors} for link in (base, delta)]
    if shapes[0] != shapes[1]:
        raise CorruptObject(f"{delta.key}: other tensors than {base.key}, on which it builds")
