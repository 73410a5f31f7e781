"""What every store promises. Keys are relative to the root of one run; `keys.py` spells them.

All objects but one are written once; `cas` exists for the one that changes (system.md §4).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tba.contracts.errors import NotFound as NotFound
from tba.contracts.errors import StoreUnavailable, UserError

Readable = bytes | bytearray | memoryview

MAX_CAS_BYTES = 65536
"""Largest body of `cas`: a pointer, not data."""
RESERVED = ".tba"
"""First segment that belongs to the store itself (locks, temporary files)."""


class AlreadyExists(RuntimeError):
    """`put_once` found an object with other bytes under its key."""


class Conflict(RuntimeError):
    """A compare-and-swap lost: the object is not (or no longer) at the expected etag.

    After a lost reply the winner may have been this very caller: read again and compare the nonce.
    """


class AccessDenied(UserError):
    """The credentials are known but may not do this.

    S3 also answers so for a key that does not exist, if the credentials may not list the bucket.
    """


class OutOfSpace(StoreUnavailable):
    """The disk or the quota is full. It does not pass within a moment, so no call waits for it in silence."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's bytes and the etag they had when read, which `cas` and `get_if_changed` take."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing or `head` knows. `last_modified` is the server's clock, in unix seconds; `size` in bytes.

    `etag` changes when the object does. From a listing it need not be the one that `head` and `get` give, so it is not
    for `cas` and `get_if_changed`: a directory names the file there (inode, size, time) and does not read it.
    """

    key: str
    size: int
    etag: str
    last_modified: float


class ObjectStore(Protocol):
    """Blocking and thread-safe. Every method retries what may pass, within the store's `RetryPolicy`.

    All raise StoreUnavailable when the budget is spent, UserError when trying again cannot help
    (credentials, bucket, clock skew) and ValueError for a malformed key.
    """

    uri: str
    """The root, without a trailing slash."""

    def get(self, key: str) -> StoredObject:
        """Read a small object whole. Raises: NotFound."""
        ...

    def get_if_changed(self, key: str, etag: str | None) -> StoredObject | None:
        """None if the object still has `etag`. Raises: NotFound."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Raises: NotFound."""
        ...

    def put_once(self, key: str, data: Readable) -> None:
        """Create an object that never changes; one with equal bytes counts as success (a lost reply).

        Large buffers go in parts, without a copy. Raises: AlreadyExists if the bytes differ.

        Of writers that race for one key exactly one succeeds, if the object is one request (up to
        `TransferSettings.part_bytes`, 16 MiB). Above that it depends on the server: SeaweedFS 4.48 checks the
        condition of CompleteMultipartUpload and then writes, so several racers may all succeed, and the last
        one's whole object stays. Hence give large objects keys that only one writer can have (a nonce).
        """
        ...

    def cas(self, key: str, data: bytes, etag: str | None) -> str:
        """Replace the object at `etag` (None: it must not exist) and return the new etag.

        Raises: Conflict, also for one's own write whose reply was lost; ValueError above MAX_CAS_BYTES.
        """
        ...

    def read_into(self, key: str, target: memoryview, *, offset: int = 0) -> None:
        """Fill `target` exactly with the bytes from `offset` on, by parallel ranged reads straight into it.

        Raises: NotFound; CorruptObject if the object ends before `target` does.
        """
        ...

    def list_after(self, prefix: str, after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects under `prefix` ("" or ending in "/") with keys > `after`, in key order.

        SeaweedFS orders by directory: exact within one leaf prefix, and for keys of fixed-width parts.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete many; a missing key is fine."""
        ...

    def now(self) -> float:
        """The server's clock, in unix seconds: what `last_modified` compares with. One request."""
        ...

    def close(self) -> None:
        """Free threads and connections; the store is of no use afterwards."""
        ...


def check_key(key: str) -> str:
    """Return `key` if every store can hold it. Raises: ValueError."""
    segments = key.split("/")
    # obstore does not escape the last four in presigned URLs, and no key of ours has them.
    if (
        any(s in ("", ".", "..") for s in segments)
        or segments[0] == RESERVED
        or not key.isprintable()
        or any(c in key for c in "?#%\\")
    ):
        raise ValueError(f"not an object key: {key!r}: use printable segments without ?#%\\ joined by single slashes")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is "" or a key followed by "/". Raises: ValueError."""
    if prefix:
        if not prefix.endswith("/"):
            raise ValueError(f"prefix must be empty or end in '/', got {prefix!r}")
        check_key(prefix[:-1])
    return prefix


def flat_view(data: Readable | memoryview, *, writable: bool = False) -> memoryview:
    """One-dimensional bytes over the same memory. Raises: ValueError if not contiguous or, if asked, read-only."""
    view = memoryview(data)
    if not view.c_contiguous or (writable and view.readonly):
        raise ValueError("the buffer must be C-contiguous" + (" and writable" if writable else ""))
    # cast() refuses shapes with a zero, so an empty view is made afresh.
    return view.cast("B") if view.nbytes else memoryview(bytearray() if writable else b"")
