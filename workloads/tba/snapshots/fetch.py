"""Fetches weights: every byte verified, tensors as views of one buffer, deltas resolved, adapters merged or beside.

manifest ─► chain ─► anchor's files ─► one buffer (hostmemory.py) ─► file and tensor hashes ─► views
                └──► deltas, oldest first, read one ahead ─► applied in place (rebuild.py) ─► tensor hashes
"""

import math
from functools import partial

import torch
from torch import Tensor

from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey
from tba.contracts.records import FileEntry, SnapshotManifest, TensorEntry
from tba.hashing import xxh3_128
from tba.snapshots.beside import Beside
from tba.snapshots.files import check_size, get_file, read_verified
from tba.snapshots.hostcache import HostCache
from tba.snapshots.hostmemory import host_memory
from tba.snapshots.layout import DTYPES, TensorSpan, parse, read_header
from tba.snapshots.manifest import Link, read_chain
from tba.snapshots.publish import ASSETS
from tba.snapshots.rebuild import advance
from tba.snapshots.snapshot import Snapshot
from tba.store.protocol import ObjectStore

_ALIGNMENT = 64  # bytes, of each file in the buffer: its tensors stay aligned
_DOWNLOADS = 2
"""Files in flight: one is hashed while another arrives."""


def fetch_snapshot(store: ObjectStore, manifest_key: str) -> Snapshot:
    """Read and verify a snapshot; of a delta the anchor and every delta up to it.

    Raises: NotFound if an object is missing (swept, or never published); CorruptObject if any byte, shape or dtype is
    not as the manifest says; StoreUnavailable.
    """
    return fetch_chain(store, read_chain(store, manifest_key))


def fetch_chain(
    store: ObjectStore, chain: list[Link], *, accept_older: bool = False, cache: HostCache | None = None
) -> Snapshot:
    """Read an anchor and the deltas on it. Raises: as `fetch_snapshot`.

    `accept_older`: if a delta cannot be read, be content with the snapshot before it.
    """
    anchor, deltas = chain[0], chain[1:]
    snapshot = _fetch_full(store, anchor, cache)
    if not deltas:
        return snapshot
    if deltas[-1].manifest.encoding == "adapter":
        return adapt_snapshot(store, snapshot, deltas[-1], cache=cache).merged()
    reached = advance(store, snapshot.tensors, None, deltas, accept_older=accept_older, cache=cache) or anchor
    return Snapshot(reached.key, reached.manifest, snapshot.tensors, snapshot.assets)


def advance_snapshot(
    store: ObjectStore, held: Snapshot, deltas: list[Link], *, cache: HostCache | None = None
) -> Snapshot:
    """Apply deltas that build on `held`, into a new buffer. Raises: as `fetch_snapshot`."""
    reached = deltas[-1]
    tensors = _allocate_tensors(reached.manifest)
    advance(store, tensors, held.tensors, deltas, cache=cache)
    return Snapshot(reached.key, reached.manifest, tensors, held.assets)


def fetch_adapter(store: ObjectStore, link: Link, *, cache: HostCache | None = None) -> dict[str, Tensor]:
    """The tensors of an adapter alone. Raises: as `fetch_snapshot`."""
    return _fetch_full(store, link, cache).tensors


def adapt_snapshot(store: ObjectStore, base: Snapshot, adapter: Link, *, cache: HostCache | None = None) -> Snapshot:
    """The base's own weights with the adapter at `adapter` beside them. Raises: as `fetch_snapshot`."""
    tensors = fetch_adapter(store, adapter, cache=cache)
    return Snapshot(adapter.key, adapter.manifest, base.tensors, base.assets, tensors)


def tensor_size(entry: TensorEntry) -> int:
    """Bytes of a tensor after decoding. Raises: KeyError for a dtype that `DTYPES` lacks."""
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


def fetch_assets(store: ObjectStore, manifest_key: str) -> dict[str, bytes]:
    """Only the assets of a snapshot, without its weights. Raises: as `fetch_snapshot`."""
    return _assets(store, read_chain(store, manifest_key)[0])


def _fetch_full(store: ObjectStore, link: Link, cache: HostCache | None) -> Snapshot:
    files = link.manifest.files
    views = _allocate(store, WeightsKey.parse(link.key).prefix, files)
    reads: list[Beside[dict[str, Tensor]]] = []
    try:
        for number, (entry, view) in enumerate(zip(files, views, strict=True)):
            if number >= _DOWNLOADS:
                reads[number - _DOWNLOADS].result()
            reads.append(Beside("snapshot-get", partial(_read_file, store, link, entry, view, cache)))
    finally:
        for read in reads:
            read.wait()
    tensors = {name: tensor for read in reads for name, tensor in read.result().items()}
    return Snapshot(link.key, link.manifest, tensors, _assets(store, link))


def _read_file(
    store: ObjectStore, link: Link, entry: FileEntry, view: memoryview, cache: HostCache | None
) -> dict[str, Tensor]:
    read_verified(store, WeightsKey.parse(link.key).prefix, entry, view, cache)
    _verify(link.key, link.manifest, entry.name, view)
    return parse(view)


def _assets(store: ObjectStore, link: Link) -> dict[str, bytes]:
    prefix = WeightsKey.parse(link.key).prefix
    return {e.name.removeprefix(ASSETS): bytes(get_file(store, prefix, e)) for e in link.manifest.assets}


def _allocate(store: ObjectStore, prefix: str, files: list[FileEntry]) -> list[memoryview]:
    """One view a file, all of one buffer."""
    for entry in files:
        check_size(store, prefix, entry)
    return _slices([entry.size for entry in files])


def _allocate_tensors(manifest: SnapshotManifest) -> dict[str, Tensor]:
    """Tensors of undefined content in the manifest's shapes, all of one buffer.

    A fresh one each time: whoever holds views of an older buffer keeps them.
    """
    views = _slices([tensor_size(entry) for entry in manifest.tensors])
    return {t.name: _shaped(t, view) for t, view in zip(manifest.tensors, views, strict=True)}


def _shaped(entry: TensorEntry, view: memoryview) -> Tensor:
    dtype = DTYPES[entry.dtype]
    if not len(view):  # frombuffer refuses empty views
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(entry.shape)


def _slices(sizes: list[int]) -> list[memoryview]:
    """Aligned views of one new buffer."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    whole = host_memory(starts[-1]).data
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


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
