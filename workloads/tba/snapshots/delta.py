"""Delta codec: a tensor's new bytes as their difference from the old ones. Pure; numpy and zstd release the GIL.

    blob   = empty (nothing changed) | one block for every BLOCK_ELEMENTS elements, the last one shorter
    block  = kind u8, then
      SAME     nothing
      SPARSE   changed u32 · gaps u32 · frame sizes u32 x (2 + itemsize) · frames: low, high bytes of the gaps, planes
      PLANES   frame sizes u32 x itemsize · frames: planes
    plane  = byte k of old XOR new, of the changed elements (SPARSE) or of all (PLANES)
    gap    = unchanged elements in front of a changed one, u16; 65535 = so many are skipped and the gap goes on

Little endian; each frame is one zstd frame of level 1. A changed bf16 weight differs in few low bits, so its low plane
has a small alphabet and its high plane is nearly all zero; both cost less apart than as pairs. The same holds for gaps.
XOR, unlike a difference, is exact for every bit pattern: NaN payloads and -0.0 come back as they were.

A reader needs no trust: sizes follow from the tensor's shape, and every length is checked before memory is taken.
"""

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from tba.contracts.errors import CorruptObject

BLOCK_ELEMENTS = 2**20
"""Bounds the memory of a codec thread (about 20 bytes an element) and keeps it near the cache."""
ITEM_SIZES = (1, 2, 4, 8)

_SAME, _SPARSE, _PLANES = range(3)
_SKIP = 65535
_LEVEL = 1
_TRY_PLANES, _ONLY_PLANES = 0.45, 0.65  # share of changed elements: where gaps begin to cost more than zeros
_Array = npt.NDArray[Any]
_Buffer = bytes | bytearray | memoryview


def encode(old: _Buffer, new: _Buffer, itemsize: int) -> bytearray:
    """The blob that turns `old` into `new`, both the bytes of a tensor whose elements have `itemsize` bytes.

    Raises: ValueError for an item size that is not 1, 2, 4 or 8, or buffers of different or broken length.
    """
    before, after = _elements(old, itemsize), _elements(new, itemsize)
    if len(before) != len(after):
        raise ValueError(f"old and new must have the same number of elements, got {len(before)} and {len(after)}")
    blocks: list[bytes] = []
    for start in range(0, len(after), BLOCK_ELEMENTS):
        blocks.append(_encode_block(before[start : start + BLOCK_ELEMENTS] ^ after[start : start + BLOCK_ELEMENTS]))
    return bytearray().join(blocks) if any(block[0] != _SAME for block in blocks) else bytearray()


def apply(target: memoryview | bytearray, blob: _Buffer, itemsize: int) -> None:
    """Turn the old bytes in `target` into the new ones, in place. Not even a right blob proves the right base: hash it.

    Raises: CorruptObject if `blob` is no blob for so many elements; `target` is of no use then. ValueError as `encode`.
    """
    elements = _elements(target, itemsize)
    cursor = _Cursor(memoryview(blob))
    if not cursor.left:
        return
    for start in range(0, len(elements), BLOCK_ELEMENTS):
        _apply_block(elements[start : start + BLOCK_ELEMENTS], cursor)
    if cursor.left:
        raise CorruptObject(f"delta: {cursor.left} bytes too many for {len(elements)} elements")


def _elements(buffer: _Buffer, itemsize: int) -> _Array:
    if itemsize not in ITEM_SIZES:
        raise ValueError(f"itemsize must be one of {ITEM_SIZES}, got {itemsize}")
    view = memoryview(buffer)
    if view.nbytes % itemsize:
        raise ValueError(f"{view.nbytes} bytes are no whole number of elements of {itemsize} bytes")
    dtype = np.dtype(f"<u{itemsize}")
    return np.frombuffer(view, dtype) if view.nbytes else np.empty(0, dtype)


def _encode_block(xor: _Array) -> bytes:
    indices = np.flatnonzero(xor != 0)
    share = len(indices) / len(xor)
    if not len(indices):
        return bytes([_SAME])
    candidates = []
    if share <= _ONLY_PLANES:
        candidates.append(_sparse(indices, xor[indices]))
    if share >= _TRY_PLANES:
        candidates.append(_frames(struct.pack("<B", _PLANES), _planes(xor)))
    return min(candidates, key=len)


def _sparse(indices: _Array, values: _Array) -> bytes:
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + 1
    tokens = gaps.astype("<u2")
    if gaps.max() >= _SKIP:
        skips = gaps // _SKIP
        tokens = np.full(len(gaps) + int(skips.sum()), _SKIP, "<u2")
        tokens[np.cumsum(skips + 1) - 1] = gaps % _SKIP
    head = struct.pack("<BII", _SPARSE, len(values), len(tokens))
    return _frames(head, [*_planes(tokens), *_planes(values)])


def _planes(elements: _Array) -> list[_Array]:
    """Byte k of every element, for each k."""
    rows = np.ascontiguousarray(elements).view(np.uint8).reshape(len(elements), elements.itemsize)
    return [np.ascontiguousarray(rows[:, k]) for k in range(elements.itemsize)]


def _frames(head: bytes, planes: list[_Array]) -> bytes:
    frames = [_codec.compressor.compress(plane.data) for plane in planes]
    return b"".join((head, struct.pack(f"<{len(frames)}I", *map(len, frames)), *frames))


def _apply_block(elements: _Array, cursor: "_Cursor") -> None:
    kind = cursor.unpack("<B")[0]
    if kind == _SPARSE:
        num_changed, num_gaps = cursor.unpack("<II")
        # A gap of g takes g // 65535 + 1 tokens, and all gaps together are shorter than the block.
        if not 0 < num_changed <= len(elements) or not 0 <= num_gaps - num_changed <= len(elements) // _SKIP:
            raise CorruptObject(f"delta: {num_changed} changes in {num_gaps} gaps, of {len(elements)} elements")
        size = elements.itemsize
        planes = _read_planes(cursor, [num_gaps] * 2 + [num_changed] * size)
        indices = _positions(_join(planes[:2]), num_changed, len(elements))
        elements[indices] ^= _join(planes[2:])
    elif kind == _PLANES:
        elements ^= _join(_read_planes(cursor, [len(elements)] * elements.itemsize))
    elif kind != _SAME:
        raise CorruptObject(f"delta: a block of unknown kind {kind}")


def _positions(tokens: _Array, num_changed: int, num_elements: int) -> _Array:
    """Indices of the changed elements: strictly rising, the last one below `num_elements`."""
    positions = np.cumsum(tokens, dtype=np.int64)
    if len(tokens) != num_changed:
        ends = tokens != _SKIP
        positions = positions[ends] if ends[-1] else positions[:0]
    if len(positions) != num_changed:
        raise CorruptObject(f"delta: the gaps do not lead to {num_changed} changed elements")
    positions += np.arange(num_changed)
    if positions[-1] >= num_elements:
        raise CorruptObject(f"delta: changes element {positions[-1]} of a block of {num_elements}")
    return positions


def _join(planes: list[_Array]) -> _Array:
    """Elements from their byte planes."""
    rows = np.empty((len(planes[0]), len(planes)), np.uint8)
    for k, plane in enumerate(planes):
        rows[:, k] = plane
    return rows.view(f"<u{len(planes)}").reshape(-1)


def _read_planes(cursor: "_Cursor", sizes: list[int]) -> list[_Array]:
    lengths = cursor.unpack(f"<{len(sizes)}I")
    return [np.frombuffer(_inflate(cursor.take(n), size), np.uint8) for n, size in zip(lengths, sizes, strict=True)]


def _inflate(frame: memoryview, size: int) -> bytes:
    try:
        # The frame's own claim decides what zstandard allocates, so it must be the one that was bounded.
        if zstandard.frame_content_size(frame) != size:
            raise CorruptObject(f"delta: a zstd frame does not announce the {size} bytes of its plane")
        plain = _codec.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"delta: {error}") from error
    if len(plain) != size:
        raise CorruptObject(f"delta: a zstd frame holds {len(plain)} bytes, announced {size}")
    return plain


class _Codec(threading.local):
    """zstd contexts are not thread-safe, and making one costs more than a small plane."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_codec = _Codec()


class _Cursor:
    """Reads forward in a blob and never past its end."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def left(self) -> int:
        return len(self._view)

    def take(self, size: int) -> memoryview:
        if size > len(self._view):
            raise CorruptObject(f"delta: ends {size - len(self._view)} bytes early")
        taken, self._view = self._view[:size], self._view[size:]
        return taken

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))
