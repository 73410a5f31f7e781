"""Publishes weights: data objects, then the manifest. Nothing is visible until `latest` names the manifest.

tensors ─► files of ≤ max_file_bytes, whole tensors each ─► put_once ─► assets ─► manifest.json
"""

from collections.abc import Mapping

from torch import Tensor

from tba.contracts.keys import WeightsKey
from tba.contracts.records import EvalRequest, FileEntry, SnapshotManifest, TensorEntry
from tba.failpoints import failpoint
from tba.hashing import xxh3_128
from tba.snapshots.files import put_files
from tba.snapshots.layout import read_header, serialise
from tba.store.protocol import ObjectStore

ASSETS = "assets/"
MAX_FILE_BYTES = 4 * 2**30


def publish_snapshot(
    store: ObjectStore,
    key: WeightsKey,
    tensors: Mapping[str, Tensor],
    *,
    assets: Mapping[str, bytes],
    parent: str | None,
    evaluation: EvalRequest | None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SnapshotManifest:
    """Write a full snapshot under `key` and return its manifest; `latest` is left to the caller's commit.

    At most one file's bytes are held beside the tensors. `parent` is the manifest key of the snapshot before.
    Raises: ValueError for tensors of an unknown dtype; AlreadyExists if `key` was used; StoreUnavailable.
    """
    files: list[FileEntry] = []
    entries: list[TensorEntry] = []
    for number, names in enumerate(split_files(tensors, max_file_bytes)):
        buffer = serialise({name: tensors[name] for name in names})
        name = f"model-{number:05d}.safetensors"
        entries += _tensor_entries(buffer, name)
        files += put_files(store, key.prefix, {name: buffer})
    asset_entries = put_files(store, key.prefix, {ASSETS + name: data for name, data in sorted(assets.items())})
    failpoint("snapshot.after_data")
    manifest = SnapshotManifest(
        epoch=key.epoch,
        version=key.version,
        nonce=key.nonce,
        parent=parent,
        files=files,
        tensors=entries,
        assets=asset_entries,
        evaluation=evaluation,
    )
    failpoint("snapshot.before_manifest")
    store.put_once(key.path, manifest.to_json())
    return manifest


def split_files(tensors: Mapping[str, Tensor], max_file_bytes: int) -> list[list[str]]:
    """Names of each file, in name order; a tensor larger than `max_file_bytes` has a file of its own."""
    files: list[list[str]] = []
    size = 0
    for name in sorted(tensors):
        if not files or size + tensors[name].nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensors[name].nbytes
    return files


def _tensor_entries(buffer: bytearray, file: str) -> list[TensorEntry]:
    view = memoryview(buffer)
    return [
        TensorEntry(name=s.name, dtype=s.dtype, shape=s.shape, file=file, hash=xxh3_128(view[s.begin : s.end]))
        for s in read_header(buffer)
    ]
