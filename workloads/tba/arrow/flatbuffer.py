"""FlatBuffers tables read with bounds checks: what the Arrow reader needs of the format, and no more.

Source: FlatBuffers internals (little-endian; a table starts with the signed distance back to its vtable).
"""

import struct


class Malformed(ValueError):
    """The bytes are not a well-formed message."""


class FlatTable:
    """One table; fields are numbered as in the schema file."""

    __slots__ = ("_at", "_data", "_vtable", "_vtable_size")

    def __init__(self, data: memoryview, pointer: int = 0) -> None:
        """The table that the offset at `pointer` leads to. Raises: Malformed if it lies outside `data`."""
        self._data = data
        self._at = pointer + self._unpack("<I", pointer)
        self._vtable = self._at - self._unpack("<i", self._at)
        self._vtable_size = self._unpack("<H", self._vtable)

    def has(self, field: int) -> bool:
        """Whether the field was written; an absent one has its default."""
        return self._slot(field) != 0

    def number(self, field: int, code: str, default: int = 0) -> int:
        """A scalar; `code` is its struct format, e.g. "<q"."""
        slot = self._slot(field)
        return self._unpack(code, self._at + slot) if slot else default

    def table(self, field: int) -> "FlatTable":
        """A sub-table or union value."""
        return FlatTable(self._data, self._required(field))

    def tables(self, field: int) -> list["FlatTable"]:
        """A vector of tables; empty if absent."""
        if not self.has(field):
            return []
        start, count = self._vector(field)
        return [FlatTable(self._data, start + 4 * i) for i in range(count)]

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A vector of structs of two int64."""
        if not self.has(field):
            return []
        start, count = self._vector(field)
        return [struct.unpack_from("<qq", self._span(start + 16 * i, 16)) for i in range(count)]

    def text(self, field: int) -> bytes:
        """A string; empty if absent."""
        if not self.has(field):
            return b""
        start, count = self._vector(field)
        return bytes(self._span(start, count))

    def _vector(self, field: int) -> tuple[int, int]:
        """Position of the first element, number of elements."""
        pointer = self._required(field)
        start = pointer + self._unpack("<I", pointer)
        count = self._unpack("<I", start)
        if count > len(self._data):  # an element takes a byte or more
            raise Malformed(f"a vector claims {count} elements in a message of {len(self._data)} bytes")
        return start + 4, count

    def _required(self, field: int) -> int:
        slot = self._slot(field)
        if not slot:
            raise Malformed(f"a message lacks field {field}")
        return self._at + slot

    def _slot(self, field: int) -> int:
        place = 4 + 2 * field
        return self._unpack("<H", self._vtable + place) if place + 2 <= self._vtable_size else 0

    def _unpack(self, code: str, position: int) -> int:
        return struct.unpack(code, self._span(position, struct.calcsize(code)))[0]

    def _span(self, position: int, size: int) -> memoryview:
        # A negative position would silently count from the end.
        if position < 0 or position + size > len(self._data):
            raise Malformed(f"position {position}+{size} lies outside a message of {len(self._data)} bytes")
        return self._data[position : position + size]
