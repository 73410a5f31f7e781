"""A snapshot that several ranks upload, each its part, as rank 0's publish thread directs it.

```
rank 0    encode own ─┐ sum of bytes:        ┌ put own files ─┐ merge ─► manifest ─► CAS of latest ─► settle
others    encode own ─┴─► full or delta, ────┴ put own files ─┘                                        keep or forget
                          one for all
```
Only rank 0 writes manifests and `latest`: whatever another does or leaves undone is visible to nobody before that.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar

from tba.contracts.errors import CorruptObject, StoreUnavailable
from tba.contracts.keys import WeightsKey
from tba.contracts.records import FileEntry
from tba.snapshots.beside import Beside
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

    def __init__(
        self,
        channels: Mapping[int, Channel],
        names: Collection[str],
        *,
        num_threads: int | None = None,
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        """`channels`: by rank. `names`: of all tensors of a snapshot, whoever holds them."""
        self._channels = dict(sorted(channels.items()))
        self._names = frozenset(names)
        self._reply_seconds = reply_seconds
        self.num_threads = num_threads
        """That encode rank 0's part; null: of a process that has the host for itself."""

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
        where this rank looks; ValueError if a tensor is in no part, or in two. None goes on then.
        """
        order = Put(version=key.version, epoch=key.epoch, nonce=key.nonce, encoding=encoding)
        mine, replies = self._ask(order, own)
        others = merge_parts(reply.part for reply in replies if isinstance(reply, Stored))
        _require_there(store, key, others.files)
        merged = merge_parts([mine, others])
        if wrong := self._names ^ {tensor.name for tensor in merged.tensors}:
            raise ValueError(
                f"each tensor must be of one part, got {sorted(wrong)[:4]} of none, or of no use: ranks deal shares "
                "differently (`shares`); start all from one release"
            )
        return merged

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
        return {rank: self._reply(rank, deadline) for rank in self._channels}

    def _reply(self, rank: int, deadline: float) -> Reply:
        try:
            text = self._channels[rank].receive(max(1.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(
                f"trainer rank {rank} must upload its part of a snapshot within {self._reply_seconds:.0f} s, got no "
                "word of it: see where it hangs; a restarted trainer resumes from the newest checkpoint"
            ) from error
        return REPLY.validate_json(text)


def _require_there(store: ObjectStore, key: WeightsKey, files: Sequence[FileEntry]) -> None:
    """Readers are to find what others wrote: their hosts may have a directory of the same name, or another endpoint."""
    shares = [files[first::_LOOKS] for first in range(min(_LOOKS, len(files)))]
    looks = [Beside("parts-look", partial(_look, store, key, share)) for share in shares]
    for look in looks:
        look.wait()
    for look in looks:
        look.result()


def _look(store: ObjectStore, key: WeightsKey, files: Sequence[FileEntry]) -> None:
    for entry in files:
        try:
            check_size(store, key.prefix, entry)
        except (NotFound, CorruptObject) as error:
            raise StoreUnavailable(
                f"{entry.name} of {key.prefix} was written by another rank and is not so in {store.uri} as rank 0 sees "
                f"it ({error}): give all hosts of the trainer the same bucket"
            ) from error


def _json(order: Order) -> str:
    return order.model_dump_json()
