"""Reads an Arrow IPC file of one record batch whose schema is known, trusting none of its bytes.

    magic · schema message · record batch message · end · footer · magic

The footer serves other tools and is not used: content is read in stream order. Only the form that our writer makes is
accepted: list offsets start at 0 and end at the length of the values, a null list is empty, buffers are zstd.
Source: Arrow columnar format 1.5 (Message.fbs, Schema.fbs; field numbers below are theirs).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import zstandard

from tba.arrow.flatbuffer import FlatTable, Malformed
from tba.contracts.errors import CorruptObject

MAX_DECODED_BYTES = 2**30
_MAGIC = b"ARROW1"
_SCHEMA_MESSAGE, _BATCH_MESSAGE = 1, 3
_ZSTD = 1
_MAX_METADATA = 16  # entries
_MAX_MESSAGE_BYTES = 2**20  # of a message without its body
# Type ids of Schema.fbs.
_INT, _FLOAT, _UTF8, _LIST, _STRUCT = 2, 3, 5, 12, 13


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One column or child: `values` of a primitive type (or UTF-8 bytes), `offsets` of lists and strings."""

    length: int
    valid: np.ndarray | None  # (length,) bool; None = no nulls
    values: np.ndarray | None = None  # (length,), of UTF-8 (bytes,) uint8
    offsets: np.ndarray | None = None  # (length + 1,) int64
    children: tuple["Column", ...] = ()

    def numpy(self, null: float | None = None) -> np.ndarray:
        """Primitive values, with `null` in place of nulls. Read-only unless there are nulls."""
        assert self.values is not None and self.offsets is None
        if self.valid is None:
            return self.values
        assert null is not None
        return np.where(self.valid, self.values, np.asarray(null, self.values.dtype))

    def lists(self) -> tuple["Column", np.ndarray]:
        """Values of all rows and the (length + 1,) int64 offsets of a list column."""
        assert self.offsets is not None and self.children
        return self.children[0], self.offsets

    def strings(self) -> list[str | None]:
        """Text rows. Raises: UnicodeDecodeError (a ValueError) if a row is not UTF-8."""
        assert self.values is not None and self.offsets is not None
        data, at = self.values.tobytes(), self.offsets.tolist()
        rows = [data[a:b].decode() for a, b in zip(at, at[1:], strict=False)]
        if self.valid is None:
            return list(rows)
        return [row if ok else None for row, ok in zip(rows, self.valid.tolist(), strict=True)]

    def codes(self, names: list[str]) -> np.ndarray:
        """(length,) int64: the index of each text row in `names`, -1 where it is none of them."""
        assert self.values is not None and self.offsets is not None
        codes = np.full(self.length, -1, np.int64)
        for code, name in enumerate(names):
            wanted = np.frombuffer(name.encode(), np.uint8)
            rows = np.flatnonzero(np.diff(self.offsets) == len(wanted))
            found = self.values[self.offsets[rows][:, None] + np.arange(len(wanted))]  # (rows, len(wanted))
            codes[rows[(found == wanted).all(axis=1)]] = code
        return codes


@dataclass(frozen=True, slots=True, eq=False)
class ArrowFile:
    """What a file holds."""

    metadata: dict[bytes, bytes]
    num_rows: int
    columns: dict[str, Column]


def read_single_batch(
    data: bytes | bytearray | memoryview, schema: pa.Schema, what: str, *, max_bytes: int = MAX_DECODED_BYTES
) -> ArrowFile:
    """Read the only record batch of an Arrow IPC file with exactly `schema`; `what` names it in errors.

    Raises: CorruptObject if `data` is no such file, has another schema, is invalid or would decode to > `max_bytes`.
    """
    view = memoryview(data).cast("B")
    if bytes(view[:6]) != _MAGIC or bytes(view[-6:]) != _MAGIC:
        raise CorruptObject(f"{what}: not a whole Arrow file ({len(view)} bytes): truncated or foreign")
    try:
        return _read(view, schema, max_bytes)
    except (ValueError, zstandard.ZstdError) as error:
        raise CorruptObject(f"{what}: {str(error)[:300]}") from error


def _read(view: memoryview, schema: pa.Schema, max_bytes: int) -> ArrowFile:
    header, _, position = _message(view, 8, _SCHEMA_MESSAGE)  # after the magic and its padding
    if header.number(0, "<h") != 0:
        raise Malformed("numbers are big-endian")
    fields, pairs = header.tables(1), header.tables(2)
    if len(fields) != len(schema):
        raise Malformed(f"another schema: {len(fields)} columns, expected {len(schema)}")
    for found, expected in zip(fields, schema, strict=True):
        _check_field(found, expected)
    if len(pairs) > _MAX_METADATA:
        raise Malformed(f"{len(pairs)} entries of metadata")
    metadata = {pair.text(0): pair.text(1) for pair in pairs}
    batch, body, position = _message(view, position, _BATCH_MESSAGE)
    if view[position : position + 8] != b"\xff\xff\xff\xff\0\0\0\0":
        raise Malformed("more than one record batch")
    num_rows = batch.number(0, "<q")
    walk = _Walk(iter(batch.pairs(1)), _buffers(batch, body, max_bytes))
    columns = {field.name: walk.column(field.type, field.nullable, num_rows, field.name) for field in schema}
    walk.finish()
    return ArrowFile(metadata, num_rows, columns)


def _message(view: memoryview, position: int, kind: int) -> tuple[FlatTable, memoryview, int]:
    """Header table and body of the message at `position`, and the position after it."""
    if position + 8 > len(view):
        raise Malformed("the file ends before its messages")
    mark, size = struct.unpack_from("<Ii", view, position)
    start = position + 8
    if mark != 0xFFFFFFFF or not 0 < size <= min(len(view) - start, _MAX_MESSAGE_BYTES):
        raise Malformed(f"no message at byte {position}")
    message = FlatTable(view[start : start + size])
    got, length = message.number(1, "<B"), message.number(3, "<q")
    if got != kind:
        raise Malformed(f"message type is {got}, expected {kind}")
    end = start + size + length
    if length < 0 or end > len(view):
        raise Malformed(f"a body of {length} bytes does not fit the file")
    return message.table(2), view[start + size : end], end


def _check_field(found: FlatTable, expected: pa.Field) -> None:
    """Compare against what is expected as it is read: a hostile schema may nest and repeat without end."""
    name, kind = found.text(0).decode(), expected.type
    children = [kind.field(i) for i in range(kind.num_fields)]
    got = (name, bool(found.number(1, "<B")), _type_name(found), len(found.tables(5)), found.has(4))  # 4 = dictionary
    nested = "list" if pa.types.is_list(kind) else "struct" if pa.types.is_struct(kind) else str(kind)
    if got != (expected.name, expected.nullable, nested, len(children), False):
        raise Malformed(f"another schema: got column {name!r} of {got[2]}, expected {expected}")
    for child, wanted in zip(found.tables(5), children, strict=True):
        _check_field(child, wanted)


def _type_name(field: FlatTable) -> str:
    kind = field.number(2, "<B")
    if kind == _INT:
        return f"{'' if field.table(3).number(1, '<B') else 'u'}int{field.table(3).number(0, '<i')}"
    if kind == _FLOAT:
        return {1: "float", 2: "double"}.get(field.table(3).number(0, "<h"), "half")
    return {_UTF8: "string", _LIST: "list", _STRUCT: "struct"}.get(kind, f"type {kind}")


def _buffers(batch: FlatTable, body: memoryview, max_bytes: int) -> Iterator[memoryview]:
    """Buffers in order, each decompressed when its turn comes; the sum of their sizes is bounded first."""
    if not batch.has(3) or batch.table(3).number(0, "<b") != _ZSTD:
        raise Malformed("buffers are not compressed with zstd")
    pieces: list[tuple[memoryview, int]] = []
    for offset, length in batch.pairs(2):
        if offset < 0 or length < 0 or offset + length > len(body) or 0 < length < 8:
            raise Malformed(f"a buffer at {offset}+{length} lies outside a body of {len(body)} bytes")
        piece = body[offset : offset + length]
        size = struct.unpack_from("<q", piece)[0] if length else 0
        size = length - 8 if size == -1 else size  # -1: stored as it is
        if size < 0:
            raise Malformed(f"a buffer claims {size} bytes")
        pieces.append((piece, size))
    total = sum(size for _, size in pieces)
    if total > max_bytes:
        raise Malformed(f"would decode to {total} bytes, limit {max_bytes}")
    return (_inflate(piece, size) for piece, size in pieces)


def _inflate(piece: memoryview, size: int) -> memoryview:
    packed = piece[8:]
    if not piece or struct.unpack_from("<q", piece)[0] == -1:
        return packed
    # The frame's own claim decides what zstandard allocates, so it must be the one that was bounded.
    if zstandard.frame_content_size(packed) != size:
        raise Malformed(f"a zstd frame does not hold the {size} bytes announced")
    plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    if len(plain) != size:
        raise Malformed(f"a zstd frame holds {len(plain)} bytes, announced {size}")
    return memoryview(plain)


class _Walk:
    """Takes nodes and buffers in schema order (depth first) and makes columns of them."""

    def __init__(self, nodes: Iterator[tuple[int, int]], buffers: Iterator[memoryview]) -> None:
        self._nodes = nodes
        self._buffers = buffers

    def column(self, kind: pa.DataType, nullable: bool, length: int, name: str) -> Column:
        found, null_count = next(self._nodes, (-1, 0))
        if found != length or length < 0:
            raise Malformed(f"column {name} has {found} entries, expected {length}")
        valid = self._validity(length, null_count, name)
        if valid is not None and not nullable:
            raise Malformed(f"column {name} holds nulls, which it must not")
        if pa.types.is_struct(kind):
            fields = [kind.field(i) for i in range(kind.num_fields)]
            children = tuple(self.column(f.type, f.nullable, length, f"{name}.{f.name}") for f in fields)
            return Column(length, valid, children=children)
        if pa.types.is_list(kind):
            offsets = self._offsets(length, valid, name)
            item = kind.value_field
            child = self.column(item.type, item.nullable, int(offsets[-1]), f"{name}[]")
            return Column(length, valid, offsets=offsets, children=(child,))
        if pa.types.is_string(kind):
            offsets = self._offsets(length, valid, name)
            return Column(length, valid, self._array(np.dtype(np.uint8), int(offsets[-1]), name), offsets)
        return Column(length, valid, self._array(np.dtype(kind.to_pandas_dtype()), length, name))

    def finish(self) -> None:
        """Raises: Malformed if anything is left over."""
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise Malformed("the record batch holds more than its schema says")

    def _validity(self, length: int, null_count: int, name: str) -> np.ndarray | None:
        """(length,) bool, or None if all are valid."""
        data = self._next(name)
        if len(data) == 0:
            if null_count:
                raise Malformed(f"column {name} says {null_count} nulls and does not say which")
            return None
        if len(data) < -(-length // 8):
            raise Malformed(f"column {name} has a validity buffer of {len(data)} bytes for {length} entries")
        valid = np.unpackbits(np.frombuffer(data, np.uint8), count=length, bitorder="little").view(np.bool_)
        if length - int(np.count_nonzero(valid)) != null_count:
            raise Malformed(f"column {name} miscounts its nulls")
        return valid if null_count else None

    def _offsets(self, length: int, valid: np.ndarray | None, name: str) -> np.ndarray:
        """(length + 1,) int64, rising from 0; null entries are empty."""
        data = self._next(name)
        if length == 0:
            return np.zeros(1, np.int64)
        if len(data) < 4 * (length + 1):
            raise Malformed(f"column {name} has {len(data)} bytes of offsets for {length} entries")
        offsets = np.frombuffer(data, "<i4", length + 1).astype(np.int64)
        lengths = np.diff(offsets)
        if offsets[0] != 0 or (lengths < 0).any() or (valid is not None and lengths[~valid].any()):
            raise Malformed(f"column {name} has offsets that do not rise from 0")
        return offsets

    def _array(self, dtype: np.dtype, length: int, name: str) -> np.ndarray:
        data = self._next(name)
        if len(data) < length * dtype.itemsize:
            raise Malformed(f"column {name} has {len(data)} bytes for {length} entries of {dtype}")
        return np.frombuffer(data, dtype, length)

    def _next(self, name: str) -> memoryview:
        data = next(self._buffers, None)
        if data is None:
            raise Malformed(f"column {name} lacks a buffer")
        return data
