"""A snapshot of a run as a model directory, and a model directory as a snapshot."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tba.cli.chain import find_assets, find_snapshot
from tba.contracts.config import Model
from tba.contracts.keys import WeightsKey, new_nonce
from tba.contracts.records import SnapshotManifest
from tba.models import load_model, weight_tensors, write_assets
from tba.snapshots.fetch import Snapshot, fetch_snapshot
from tba.snapshots.files import get_file
from tba.snapshots.manifest import fetch_manifest
from tba.snapshots.publish import ASSETS
from tba.store.protocol import ObjectStore

WEIGHTS_FILE = "model.safetensors"


def read_snapshot(store: ObjectStore, version: int | None) -> Snapshot:
    """A verified snapshot with its assets. Raises: UserError, CorruptObject, StoreUnavailable."""
    snapshot = fetch_snapshot(store, find_snapshot(store, version))
    if not snapshot.assets:
        snapshot = dataclasses.replace(snapshot, assets=newest_assets(store))
    return snapshot


def newest_assets(store: ObjectStore) -> dict[str, bytes]:
    """Configuration and tokenizer of the run's model. Raises: UserError, CorruptObject, StoreUnavailable."""
    return _assets_of(store, find_assets(store))


def write_directory(tensors: Mapping[str, Tensor], assets: Mapping[str, bytes], folder: Path) -> None:
    """Write what `from_pretrained` reads. Weights come last: a directory that has them is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_assets(assets, folder)
    partial = folder / f".{WEIGHTS_FILE}.partial"
    # transformers refuses a file that does not say which framework wrote it.
    save_file({n: t.contiguous() for n, t in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)


def directory_snapshot(folder: Path, *, trust_remote_code: bool = False) -> Snapshot:
    """The model in `folder` in the shape engines load. Raises: UserError."""
    settings = Model(uri=f"file://{folder.resolve()}", trust_remote_code=trust_remote_code)
    loaded = load_model(settings, base_dir=folder)
    manifest = SnapshotManifest(epoch=1, version=0, nonce=new_nonce(), files=[], tensors=[])
    return Snapshot(str(folder), manifest, weight_tensors(loaded.model), dict(loaded.assets))


def _assets_of(store: ObjectStore, manifest_key: str) -> dict[str, bytes]:
    """Only the assets of a snapshot, without its weights."""
    prefix = WeightsKey.parse(manifest_key).prefix
    entries = fetch_manifest(store, manifest_key).assets
    return {e.name.removeprefix(ASSETS): bytes(get_file(store, prefix, e)) for e in entries}
