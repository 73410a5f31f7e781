"""Fetches weights: every file into one buffer, every byte verified, tensors as views of it.

manifest ─► sizes ─► one buffer (pinned if there is a GPU) ─► ranged reads ─► file hashes ─► tensor hashes ─► views
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.keys import WeightsKey
from tba.contracts.records import FileEntry, SnapshotManifest, TensorEntry
from tba.hashing import xxh3_128
from tba.snapshots.files import check_size, get_file, read_verified
from tba.snapshots.layout import TensorSpan, parse, read_header
from tba.snapshots.manifest import fetch_manifest
from tba.snapshots.publish import ASSETS
from tba.store.protocol import ObjectStore

_ALIGNMENT = 64  # bytes, of each file in the buffer: its tensors stay aligned


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Verified weights in host memory."""

    key: str  # of the manifest
    manifest: SnapshotManifest
    tensors: dict[str, Tensor]  # views of one buffer; pinned if CUDA is available
    assets: dict[str, bytes]  # config.json, tokenizer files; empty unless the snapshot carries them


def fetch_snapshot(store: ObjectStore, manifest_key: str) -> Snapshot:
    """Read and verify a snapshot.

    Raises: NotFound if an object is missing (swept, or never published); CorruptObject if any byte, shape or dtype is
    not as the manifest says; UserError for an encoding that this version cannot read; StoreUnavailable.
    """
    manifest = fetch_manifest(store, manifest_key)
    if manifest.encoding != "full":
        raise UserError(
            f"snapshot {manifest_key} has encoding {manifest.encoding!r}, this version reads 'full' only: "
            "use the same release for trainer and searchers, or set sync.delta.enabled: false"
        )
    prefix = WeightsKey.parse(manifest_key).prefix
    tensors: dict[str, Tensor] = {}
    for entry, view in zip(manifest.files, _allocate(store, prefix, manifest.files), strict=True):
        read_verified(store, prefix, entry, view)
        _verify(manifest_key, manifest, entry.name, view)
        tensors |= parse(view)
    return Snapshot(manifest_key, manifest, tensors, _assets(store, manifest_key, manifest))


def fetch_assets(store: ObjectStore, manifest_key: str) -> dict[str, bytes]:
    """Only the assets of a snapshot, without its weights. Raises: as `fetch_snapshot`."""
    return _assets(store, manifest_key, fetch_manifest(store, manifest_key))


def _assets(store: ObjectStore, manifest_key: str, manifest: SnapshotManifest) -> dict[str, bytes]:
    prefix = WeightsKey.parse(manifest_key).prefix
    return {e.name.removeprefix(ASSETS): bytes(get_file(store, prefix, e)) for e in manifest.assets}


def _allocate(store: ObjectStore, prefix: str, files: list[FileEntry]) -> list[memoryview]:
    """One view a file, all of one buffer."""
    for entry in files:
        check_size(store, prefix, entry)
    starts = [0]
    for entry in files:
        starts.append(starts[-1] + -(-entry.size // _ALIGNMENT) * _ALIGNMENT)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    whole = buffer.numpy().data
    return [whole[start : start + entry.size] for start, entry in zip(starts, files, strict=False)]


def _verify(manifest_key: str, manifest: SnapshotManifest, file: str, view: memoryview) -> None:
    """Compare every tensor of a file with the manifest."""
    expected = {t.name: t for t in manifest.tensors if t.file == file}
    spans = read_header(view)
    if {span.name for span in spans} != set(expected):
        raise CorruptObject(f"{manifest_key}: {file} holds other tensors than the manifest says")
    for span in spans:
        problem = _difference(expected[span.name], span, view)
        if problem:
            raise CorruptObject(f"{manifest_key}: {file}: {problem}")


def _difference(entry: TensorEntry, span: TensorSpan, view: memoryview) -> str | None:
    if (span.dtype, span.shape) != (entry.dtype, entry.shape):
        return f"{entry.name} is {span.dtype} {span.shape}, manifest says {entry.dtype} {entry.shape}"
    got = xxh3_128(view[span.begin : span.end])
    return None if got == entry.hash else f"{entry.name} has hash {got}, manifest says {entry.hash}"
