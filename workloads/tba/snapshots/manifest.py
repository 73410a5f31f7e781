"""Reads a snapshot's manifest and checks that it is the one its key names."""

from pydantic import ValidationError

from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey
from tba.contracts.records import SnapshotManifest
from tba.store.protocol import ObjectStore


def fetch_manifest(store: ObjectStore, manifest_key: str) -> SnapshotManifest:
    """Read and check a manifest. Raises: NotFound; CorruptObject; ValueError if `manifest_key` is no manifest key."""
    key = WeightsKey.parse(manifest_key)
    if key.path != manifest_key:
        raise ValueError(f"not a manifest key: {manifest_key!r}, expected {key.path!r}")
    data = store.get(manifest_key).data
    try:
        manifest = SnapshotManifest.model_validate_json(data)
    except ValidationError as error:
        raise CorruptObject(f"{manifest_key}: not a manifest ({len(data)} bytes): {str(error)[:300]}") from error
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
    return manifest
