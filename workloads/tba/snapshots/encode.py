"""Makes a delta of two sets of host tensors, in a pool of threads.

base tensors, new tensors ─► blob a tensor (delta.py) + hash of the new bytes ─► too large? then none
                                                   └─► files of ≤ max_file_bytes: safetensors of U8 blobs

All of a snapshot's tensors (`encode_delta`), or those that one process holds (`encode_part`).
"""

import math
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tba.contracts.errors import CorruptObject
from tba.contracts.records import SnapshotManifest, TensorEntry
from tba.hashing import xxh3_128
from tba.snapshots import delta
from tba.snapshots.layout import DTYPES, dtype_name
from tba.snapshots.manifest import weights_hash


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """Published weights that a delta can build on. The tensors must not change as long as this lives."""

    key: str  # of the manifest
    manifest: SnapshotManifest
    tensors: Mapping[str, Tensor]
    """All of the manifest's, or those that this process holds."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPart:
    """The differences of some tensors, in memory."""

    blobs: dict[str, Tensor]  # name -> (bytes,) uint8
    tensors: list[TensorEntry]  # `file` is left empty

    @property
    def num_bytes(self) -> int:
        """Of all blobs."""
        return sum(blob.nbytes for blob in self.blobs.values())


@dataclass(frozen=True, slots=True, eq=False)
class EncodedDelta:
    """A delta in memory, ready to be written: all of it, or what one process holds of it."""

    base: str
    base_hash: str
    depth: int
    part: EncodedPart

    @property
    def num_bytes(self) -> int:
        """Of the blobs that are here."""
        return self.part.num_bytes


def encode_delta(
    base: Base, tensors: Mapping[str, Tensor], *, max_bytes: float, num_threads: int | None = None
) -> EncodedDelta | None:
    """The difference of `tensors` from those of `base`; else as `encode_part`."""
    held = [t for t in base.manifest.tensors if t.name in base.tensors]
    part = encode_part(base.key, held, base.tensors, tensors, max_bytes=max_bytes, num_threads=num_threads)
    if part is None:
        return None
    return EncodedDelta(base.key, weights_hash(base.manifest), base.manifest.depth + 1, part)


def encode_part(
    key: str,
    entries: Iterable[TensorEntry],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    max_bytes: float,
    num_threads: int | None = None,
) -> EncodedPart | None:
    """The difference of `after` from `before`, which was published as `entries` below `key`.

    None if it takes more than `max_bytes`, or names or shapes changed. Holds at most `max_bytes` and a few MB a thread
    beside the tensors. Raises: CorruptObject if `before` is not what was published any more: whoever builds on it would
    be misled.
    """
    old = {t.name: t for t in entries}
    if {n: (dtype_name(t.dtype), list(t.shape)) for n, t in after.items()} != {
        n: (t.dtype, t.shape) for n, t in old.items()
    }:
        return None
    lock, too_large = threading.Lock(), threading.Event()
    total = 0

    def one(name: str) -> tuple[bytearray, str]:
        nonlocal total
        if too_large.is_set():
            return bytearray(), ""
        was, now = tensor_bytes(before[name]), tensor_bytes(after[name])
        if xxh3_128(was.data) != old[name].hash:
            raise CorruptObject(f"{name} of {key} has changed in memory since it was published")
        blob = delta.encode(was.data, now.data, after[name].itemsize)
        with lock:
            total += len(blob)
            if total > max_bytes:
                too_large.set()
        return blob, xxh3_128(now.data) if blob else old[name].hash

    with ThreadPoolExecutor(num_threads or codec_threads(), thread_name_prefix="delta-encode") as pool:
        names = sorted(after, key=lambda name: (-after[name].nbytes, name))  # the largest must not come last
        made = dict(zip(names, pool.map(one, names), strict=True))
    if too_large.is_set():
        return None
    return EncodedPart(
        blobs={name: _as_tensor(made[name][0]) for name in sorted(made)},
        tensors=[
            TensorEntry(name=n, dtype=old[n].dtype, shape=old[n].shape, file="", hash=made[n][1]) for n in sorted(made)
        ],
    )


def full_bytes(entries: Iterable[TensorEntry]) -> int:
    """Of these tensors in full. Raises: KeyError for a dtype that no writer of ours knows."""
    return sum(math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in entries)


def codec_threads(processes: int = 1) -> int:
    """Few: they work beside a training step or beside generation, and each wants the interpreter too.

    `processes`: of this host that do so at once, and share its processors.
    """
    return max(1, min(4, len(os.sched_getaffinity(0)) // (4 * processes)))


def tensor_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a host tensor in row order, (nbytes,) uint8; a view if the tensor is contiguous."""
    flat: Any = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def _as_tensor(blob: bytearray) -> Tensor:
    return torch.frombuffer(blob, dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
