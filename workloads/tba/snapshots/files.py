"""Data objects below a manifest: written once with their size and hash, read back verified."""

import re
from collections.abc import Mapping

import numpy as np

from tba.contracts.errors import CorruptObject
from tba.contracts.records import FileEntry
from tba.hashing import xxh3_128
from tba.snapshots.hostcache import HostCache
from tba.store.protocol import ObjectStore, Readable, flat_view

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*")
_MAX_BYTES = 2**40


def put_files(store: ObjectStore, prefix: str, files: Mapping[str, Readable]) -> list[FileEntry]:
    """Write each buffer at `prefix` + its name, in order, and say what was written.

    Raises: ValueError for a name that is no relative path of plain segments; AlreadyExists; StoreUnavailable.
    """
    for name in files:
        if not _NAME.fullmatch(name):
            raise ValueError(f"file name must be a relative path of letters, digits and '._+-', got {name!r}")
    entries = [FileEntry(name=name, size=len(flat_view(f)), hash=xxh3_128(flat_view(f))) for name, f in files.items()]
    for entry in entries:
        store.put_once(prefix + entry.name, files[entry.name])
    return entries


def get_file(store: ObjectStore, prefix: str, entry: FileEntry, cache: HostCache | None = None) -> memoryview:
    """Read a whole object into a buffer of its own. Raises: NotFound; CorruptObject; StoreUnavailable."""
    check_size(store, prefix, entry)
    data = np.empty(entry.size, np.uint8).data  # a bytearray would be filled with zeros under the interpreter's lock
    read_verified(store, prefix, entry, data, cache)
    return data


def check_size(store: ObjectStore, prefix: str, entry: FileEntry) -> None:
    """Compare the object's size with the manifest's before memory is allocated for it.

    Raises: NotFound; CorruptObject if they differ or the entry is not one that `put_files` could have made.
    """
    if not _NAME.fullmatch(entry.name) or entry.size > _MAX_BYTES:
        raise CorruptObject(f"{prefix}: the manifest lists {entry.name!r} of {entry.size} bytes: not a data object")
    size = store.head(prefix + entry.name).size
    if size != entry.size:
        raise CorruptObject(f"{prefix}{entry.name}: object has {size} bytes, manifest says {entry.size}: torn")


def read_verified(
    store: ObjectStore, prefix: str, entry: FileEntry, target: memoryview, cache: HostCache | None = None
) -> None:
    """Fill `target` (of `entry.size` bytes) with the object and compare its hash. Raises: NotFound; CorruptObject."""
    if cache is not None:
        cache.read(store.uri, entry, target, lambda: read_verified(store, prefix, entry, target))
        return
    if entry.size:
        store.read_into(prefix + entry.name, target)
    got = xxh3_128(target)
    if got != entry.hash:
        raise CorruptObject(f"{prefix}{entry.name}: hash is {got}, manifest says {entry.hash}: the bytes were changed")
