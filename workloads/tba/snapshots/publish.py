"""Publishes weights: data objects, then the manifest. Nothing is visible until `latest` names the manifest.

tensors or delta ─► files of ≤ max_file_bytes, whole tensors each ─► put_once, two at a time ─► assets ─► manifest.json

Where several processes hold a part each, all write the files of theirs and one finishes: assets, manifest.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tba.contracts.keys import WeightsKey
from tba.contracts.records import EvalRequest, FileEntry, SnapshotManifest, TensorEntry
from tba.failpoints import failpoint
from tba.hashing import xxh3_128
from tba.snapshots.beside import Beside
from tba.snapshots.encode import EncodedDelta, EncodedPart
from tba.snapshots.files import put_files
from tba.snapshots.layout import read_header, serialise
from tba.snapshots.manifest import Link, weights_hash
from tba.store.protocol import ObjectStore

ASSETS = "assets/"
FULL, DELTA, ADAPTER = "model", "delta", "adapter"
"""Stems of file names."""
MAX_FILE_BYTES = 2**29
_MIN_FILE_BYTES = 2**26
_FILES = 8
"""Of a snapshot as far as those two allow: one file is copied and hashed while others travel."""
_UPLOADS = 2
"""Files in flight, each in parts of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """Data objects of a snapshot and the tensors in them: all of it, or what one process holds of it."""

    files: list[FileEntry]
    tensors: list[TensorEntry]


def merge_parts(parts: Iterable[Part]) -> Part:
    """One of all, in their order. Raises: ValueError if two hold a file or a tensor of the same name."""
    merged = Part([], [])
    for part in parts:
        merged.files.extend(part.files)
        merged.tensors.extend(part.tensors)
    for kind, entries in (("file", merged.files), ("tensor", merged.tensors)):
        counts = Counter(entry.name for entry in entries)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"each {kind} must be of one part, got {twice[:4]} of several: assign it to one process")
    return merged


def part_stem(stem: str, rank: int) -> str:
    """Of the files that process `rank` of several writes, so that no two write one key."""
    return f"{stem}-rank{rank:05d}"


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

    At most two files' bytes are held beside the tensors. `parent` is the manifest key of the snapshot before.
    Raises: ValueError for tensors of an unknown dtype; AlreadyExists if `key` was used; StoreUnavailable.
    """
    part = put_tensors(store, key, tensors, stem=FULL, max_file_bytes=max_file_bytes)
    return finish_snapshot(store, key, part, assets=assets, parent=parent, evaluation=evaluation)


def finish_snapshot(
    store: ObjectStore,
    key: WeightsKey,
    part: Part,
    *,
    assets: Mapping[str, bytes],
    parent: str | None,
    evaluation: EvalRequest | None,
) -> SnapshotManifest:
    """Write what makes a full snapshot of data objects that are there, and return its manifest.

    `part`: all of them. Raises: AlreadyExists if `key` was used; StoreUnavailable.
    """
    asset_entries = put_files(store, key.prefix, {ASSETS + name: data for name, data in sorted(assets.items())})
    failpoint("snapshot.after_data")
    manifest = SnapshotManifest(
        epoch=key.epoch,
        version=key.version,
        nonce=key.nonce,
        parent=parent,
        files=part.files,
        tensors=part.tensors,
        assets=asset_entries,
        evaluation=evaluation,
    )
    return _put_manifest(store, key, manifest)


def publish_delta(
    store: ObjectStore,
    key: WeightsKey,
    delta: EncodedDelta,
    *,
    parent: str | None,
    evaluation: EvalRequest | None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SnapshotManifest:
    """Write a delta under `key` and return its manifest. It has no assets: those of its anchor are its own.

    Raises: AlreadyExists if `key` was used; StoreUnavailable.
    """
    part = put_encoded(store, key, delta.part, stem=DELTA, max_file_bytes=max_file_bytes)
    return finish_delta(store, key, delta, part, parent=parent, evaluation=evaluation)


def finish_delta(
    store: ObjectStore,
    key: WeightsKey,
    delta: EncodedDelta,
    part: Part,
    *,
    parent: str | None,
    evaluation: EvalRequest | None,
) -> SnapshotManifest:
    """Write what makes a delta of data objects that are there, and return its manifest.

    `part`: all of them; `delta` says what they build on. Raises: AlreadyExists if `key` was used; StoreUnavailable.
    """
    failpoint("snapshot.after_data")
    manifest = SnapshotManifest(
        epoch=key.epoch,
        version=key.version,
        nonce=key.nonce,
        encoding="delta",
        base=delta.base,
        base_hash=delta.base_hash,
        depth=delta.depth,
        parent=parent,
        files=part.files,
        tensors=part.tensors,
        evaluation=evaluation,
    )
    return _put_manifest(store, key, manifest)


def publish_adapter(
    store: ObjectStore,
    key: WeightsKey,
    tensors: Mapping[str, Tensor],
    *,
    scale: float,
    base: Link,
    parent: str | None,
    evaluation: EvalRequest | None,
) -> SnapshotManifest:
    """Write an adapter alone under `key` and return its manifest; the weights it applies to are those of `base`.

    Raises: ValueError for tensors of an unknown dtype; AlreadyExists if `key` was used; StoreUnavailable.
    """
    part = put_tensors(store, key, tensors, stem=ADAPTER, max_file_bytes=MAX_FILE_BYTES)
    failpoint("snapshot.after_data")
    manifest = SnapshotManifest(
        epoch=key.epoch,
        version=key.version,
        nonce=key.nonce,
        encoding="adapter",
        base=base.key,
        base_hash=weights_hash(base.manifest),
        depth=1,
        scale=scale,
        parent=parent,
        files=part.files,
        tensors=part.tensors,
        evaluation=evaluation,
    )
    return _put_manifest(store, key, manifest)


def put_tensors(
    store: ObjectStore, key: WeightsKey, tensors: Mapping[str, Tensor], *, stem: str, max_file_bytes: int
) -> Part:
    """Write tensors as `{stem}-{number}.safetensors` below `key`; no tensors, no file.

    Raises: ValueError; AlreadyExists; StoreUnavailable: of the first file that failed, once no upload is under way.
    """
    entries: list[TensorEntry] = []
    uploads: list[Beside[list[FileEntry]]] = []
    file_bytes = min(max_file_bytes, max(_MIN_FILE_BYTES, sum(t.nbytes for t in tensors.values()) // _FILES))
    try:
        for number, names in enumerate(split_files(tensors, file_bytes)):
            if number >= _UPLOADS:
                uploads[number - _UPLOADS].result()
            name = f"{stem}-{number:05d}.safetensors"
            buffer = serialise({n: tensors[n] for n in names})
            entries += _tensor_entries(buffer, name)
            uploads.append(Beside("snapshot-put", partial(_put_file, store, key.prefix, name, buffer)))
    finally:
        for upload in uploads:
            upload.wait()
    return Part([entry for upload in uploads for entry in upload.result()], entries)


def put_encoded(store: ObjectStore, key: WeightsKey, encoded: EncodedPart, *, stem: str, max_file_bytes: int) -> Part:
    """Write differences as `put_tensors` does; the entries are those of the resulting tensors. Raises: the same."""
    part = put_tensors(store, key, encoded.blobs, stem=stem, max_file_bytes=max_file_bytes)
    files = {t.name: t.file for t in part.tensors}
    return Part(part.files, [t.model_copy(update={"file": files[t.name]}) for t in encoded.tensors])


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


def _put_file(store: ObjectStore, prefix: str, name: str, buffer: memoryview) -> list[FileEntry]:
    failpoint("snapshot.before_file")
    return put_files(store, prefix, {name: buffer})


def _put_manifest(store: ObjectStore, key: WeightsKey, manifest: SnapshotManifest) -> SnapshotManifest:
    failpoint("snapshot.before_manifest")
    store.put_once(key.path, manifest.to_json())
    return manifest


def _tensor_entries(view: memoryview, file: str) -> list[TensorEntry]:
    return [
        TensorEntry(name=s.name, dtype=s.dtype, shape=s.shape, file=file, hash=xxh3_128(view[s.begin : s.end]))
        for s in read_header(view)
    ]
