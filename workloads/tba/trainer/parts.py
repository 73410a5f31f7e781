"""A snapshot that several ranks upload, each its part, as rank 0's publish thread directs it.

```
rank 0    encode own ─┐ sum of bytes:        ┌ put own files ─┐ merge ─► manifest ─► CAS of latest ─► settle
others    encode own ─┴─► full or delta, ────┴ put own files ─┘                                        keep or forget
                          one for all
```
Only rank 0 writes manifests and `latest`: whatever another does or leaves undone is visible to nobody before that.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from tba.contracts.errors import CorruptObject, StoreUnavailable
from tba.contracts.keys import WeightsKey
from tba.contracts.records import FileEntry
from tba.snapshots.encode import EncodedDelta
from tba.snapshots.files import check_size
from tba.snapshots.publish import Part, merge_parts
from tba.store import NotFound, ObjectStore
from tba.trainer.channel import Channel
from tba.trainer.partmessages import REPLY, Encode, Encoded, Failed, Order, Put, Reply, Settle, Stored

REPLY_SECONDS = 7200.0
"""A rank that is silent for longer hangs: what it uploads is a part of what was one upload, retries included."""
_LOOKS = 8
"""Requests at once for what others wrote."""

T = TypeVar("T")


class Parts:
    """The other ranks that upload. For the thread that publishes."""

    def __init__(self, channels: Mapping[int, Channel], *, reply_seconds: float = REPLY_SECONDS) -> None:
        """`channels`: by rank."""
        self._channels = dict(sorted(channels.items()))
        self._reply_seconds = reply_seconds

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that hold and upload a part, rank 0 first."""
        return (0, *self._channels)

    def encode(self, base: str, own: Callable[[], EncodedDelta | None], *, max_bytes: float) -> EncodedDelta | None:
        """What `own` gives, if all parts together take at most `max_bytes`; else None, for all.

        Raises: what `own` does; CorruptObject if a rank's copy of `base` is not what was published.
        """
        made, replies = self._ask(Encode(base=base, max_bytes=max_bytes), own)
        sizes = [reply.num_bytes for reply in replies if isinstance(reply, Encoded)]
        known = [size for size in sizes if size is not None]
        if made is None or len(known) < len(self._channels) or made.num_bytes + sum(known) > max_bytes:
            return None
        return made

    def put(
        self, store: ObjectStore, key: WeightsKey, encoding: Literal["full", "delta"], own: Callable[[], Part]
    ) -> Part:
        """All data objects below `key`, of all ranks, once they are in `store`; `own` writes rank 0's.

        Raises: what `own` does; StoreUnavailable, AccessDenied, UserError of another rank's uploads, or if they are not
        where this rank looks. None goes on then.
        """
        order = Put(version=key.version, epoch=key.epoch, nonce=key.nonce, encoding=encoding)
        mine, replies = self._ask(order, own)
        others = merge_parts(reply.part for reply in replies if isinstance(reply, Stored))
        _require_there(store, key, others.files)
        return merge_parts([mine, others])

    def settle(self, base: str | None) -> None:
        """The publish is over; `base`: manifest key under which its tensors are kept, null: they are not."""
        for channel in self._channels.values():
            channel.send(_json(Settle(base=base)))

    def _ask(self, order: Order, own: Callable[[], T]) -> tuple[T, list[Reply]]:
        for channel in self._channels.values():
            channel.send(_json(order))
        try:
            mine = own()
        finally:  # all have ended before anything else is asked for: two tries never run side by side
            replies = self._replies()
        for rank, reply in replies.items():
            if isinstance(reply, Failed):
                raise reply.exception(rank)
        return mine, list(replies.values())

    def _replies(self) -> dict[int, Reply]:
        deadline = time.monotonic() + self._reply_seconds
        return {
            rank: REPLY.validate_json(channel.receive(max(1.0, deadline - time.monotonic())))
            for rank, channel in self._channels.items()
        }


def _require_there(store: ObjectStore, key: WeightsKey, files: Sequence[FileEntry]) -> None:
    """Readers are to find what others wrote: their hosts may have a directory of the same name, or another endpoint."""

    def look(entry: FileEntry) -> None:
        try:
            check_size(store, key.prefix, entry)
        except (NotFound, CorruptObject) as error:
            raise StoreUnavailable(
                f"{entry.name} of {key.prefix} was written by another rank and is not so in {store.uri} as rank 0 sees "
                f"it ({error}): give all hosts of the trainer the same bucket"
            ) from error

    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="parts-look") as pool:
        list(pool.map(look, files))


def _json(order: Order) -> str:
    return order.model_dump_json()
