"""Brings host tensors forward by deltas: the next delta is read while this one is applied, by threads a tensor each.

    copy the base ─► delta 1 apply ─► delta 2 apply ─► … ─► hash every tensor
    delta 1 read  ┘└ delta 2 read  ┘└ delta 3 read …

Only the last state is hashed tensor by tensor: that it is right proves that all before it were.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch import Tensor

from tba.contracts.errors import CorruptObject
from tba.contracts.keys import WeightsKey
from tba.contracts.records import SnapshotManifest
from tba.hashing import xxh3_128
from tba.snapshots import delta
from tba.snapshots.beside import Beside
from tba.snapshots.encode import codec_threads, tensor_bytes
from tba.snapshots.files import get_file
from tba.snapshots.hostcache import HostCache
from tba.snapshots.layout import read_header
from tba.snapshots.manifest import Link
from tba.store.protocol import NotFound, ObjectStore

_Blobs = dict[str, memoryview]


def advance(
    store: ObjectStore,
    target: Mapping[str, Tensor],
    base: Mapping[str, Tensor] | None,
    deltas: list[Link],
    *,
    accept_older: bool = False,
    cache: HostCache | None = None,
) -> Link | None:
    """Turn `target` into the weights of the last delta, starting from `base` (None: from what it holds).

    Returns the link reached: the last one, or with `accept_older` the last before one that cannot be read (None: not
    even the first). Raises: NotFound; CorruptObject, and `target` is of no use then; StoreUnavailable.
    """
    reached: Link | None = None
    ahead: Beside[_Blobs] | None = _read_ahead(store, deltas[0], cache)
    with ThreadPoolExecutor(codec_threads(), thread_name_prefix="delta-apply") as pool:
        if base is not None:
            _all(pool, lambda name: np.copyto(tensor_bytes(target[name]), tensor_bytes(base[name])), _by_size(target))
        for number, link in enumerate(deltas):
            assert ahead is not None
            try:
                blobs = ahead.result()
            except (CorruptObject, NotFound):
                if not accept_older:
                    raise
                break
            ahead = _read_ahead(store, deltas[number + 1], cache) if number + 1 < len(deltas) else None
            _all(pool, lambda name, blobs=blobs: _apply(target[name], blobs[name], name), _by_size(target))
            reached = link
        if reached is not None:
            verify(target, reached, pool)
        return reached


def verify(tensors: Mapping[str, Tensor], link: Link, pool: ThreadPoolExecutor | None = None) -> None:
    """Compare every tensor's bytes with the manifest. Raises: CorruptObject naming the tensor."""
    if pool is None:
        with ThreadPoolExecutor(codec_threads(), thread_name_prefix="delta-verify") as own:
            return verify(tensors, link, own)
    expected = {t.name: t.hash for t in link.manifest.tensors}

    def check(name: str) -> None:
        got = xxh3_128(tensor_bytes(tensors[name]).data)
        if got != expected[name]:
            raise CorruptObject(f"{link.key}: {name} has hash {got} after its deltas, manifest says {expected[name]}")

    _all(pool, check, _by_size(tensors))


def _read_ahead(store: ObjectStore, link: Link, cache: HostCache | None) -> Beside[_Blobs]:
    return Beside("delta-read", lambda: _read(store, link, cache))


def _read(store: ObjectStore, link: Link, cache: HostCache | None) -> _Blobs:
    """Every tensor's blob, from verified files."""
    prefix = WeightsKey.parse(link.key).prefix
    blobs: _Blobs = {}
    for entry in link.manifest.files:
        view = get_file(store, prefix, entry, cache)
        spans = read_header(view)
        if {s.name for s in spans} != _placed(link.manifest, entry.name) or any(s.dtype != "U8" for s in spans):
            raise CorruptObject(f"{link.key}: {entry.name} holds other deltas than the manifest says")
        blobs |= {s.name: view[s.begin : s.end] for s in spans}
    return blobs


def _placed(manifest: SnapshotManifest, file: str) -> set[str]:
    return {t.name for t in manifest.tensors if t.file == file}


def _apply(tensor: Tensor, blob: memoryview, name: str) -> None:
    try:
        delta.apply(tensor_bytes(tensor).data, blob, tensor.itemsize)
    except CorruptObject as error:
        raise CorruptObject(f"{name}: {error}") from error


def _by_size(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names, the largest first: none of them is left for one thread at the end."""
    return sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))


def _all(pool: ThreadPoolExecutor, work: Callable[[str], Any], names: Iterable[str]) -> None:
    """Do all; the first error is raised once no thread is at work any more."""
    futures = [pool.submit(work, name) for name in names]
    errors = [error for error in (future.exception() for future in futures) if error]
    if errors:
        raise errors[0]
