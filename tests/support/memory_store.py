"""A small object store in memory with a clock under the test's control, and replies that get lost on demand."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tba.store.protocol import AlreadyExists, Conflict, NotFound, ObjectInfo, Readable, StoredObject


@dataclass(slots=True)
class _Object:
    data: bytes
    last_modified: float


class MemoryStore:
    """`ObjectStore` over a dict. ETags derive from content, as in S3."""

    uri = "memory://"

    def __init__(self, clock: float = 1000.0) -> None:
        self.objects: dict[str, _Object] = {}
        self.clock = clock
        self.calls: list[tuple[str, str]] = []
        self.lose_replies = 0
        """So many next swaps happen but report a conflict, as a retried request would see."""
        self.before_cas = lambda: None
        """Runs before each swap: the place for another trainer's move."""

    def get(self, key: str) -> StoredObject:
        self.calls.append(("get", key))
        if key not in self.objects:
            raise NotFound(key)
        return StoredObject(self.objects[key].data, self._etag(key))

    def get_if_changed(self, key: str, etag: str | None) -> StoredObject | None:
        stored = self.get(key)
        return None if stored.etag == etag else stored

    def head(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise NotFound(key)
        return self._info(key)

    def put_once(self, key: str, data: Readable) -> None:
        self.calls.append(("put_once", key))
        data = bytes(data)
        if key in self.objects and self.objects[key].data != data:
            raise AlreadyExists(key)
        self.objects.setdefault(key, _Object(data, self.clock))

    def cas(self, key: str, data: bytes, etag: str | None) -> str:
        self.calls.append(("cas", key))
        self.before_cas()
        if (self._etag(key) if key in self.objects else None) != etag:
            raise Conflict(key)
        self.objects[key] = _Object(bytes(data), self.clock)
        if self.lose_replies > 0:
            self.lose_replies -= 1
            raise Conflict(key)
        return self._etag(key)

    def read_into(self, key: str, target: memoryview, *, offset: int = 0) -> None:
        data = self.get(key).data
        target[:] = data[offset : offset + len(target)]

    def list_after(self, prefix: str, after: str | None = None) -> Iterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        names = sorted(k for k in self.objects if k.startswith(prefix) and (after is None or k > after))
        return (self._info(name) for name in names)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.calls.append(("delete", key))
            self.objects.pop(key, None)

    def now(self) -> float:
        return self.clock

    def close(self) -> None:
        pass

    def count(self, call: str) -> int:
        return sum(1 for name, _ in self.calls if name == call)

    def _etag(self, key: str) -> str:
        return hashlib.md5(self.objects[key].data).hexdigest()

    def _info(self, key: str) -> ObjectInfo:
        stored = self.objects[key]
        return ObjectInfo(key, len(stored.data), self._etag(key), stored.last_modified)


class Nonces:
    """Distinct 32-digit nonces in a row."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self) -> str:
        return f"{next(self._numbers):032x}"
