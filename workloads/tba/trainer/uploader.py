"""Encodes and uploads one rank's part of each snapshot, in a thread of its own, as rank 0 directs it (`parts`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tba.contracts.records import TensorEntry
from tba.failpoints import failpoint
from tba.snapshots.beside import Beside
from tba.snapshots.encode import EncodedPart, encode_part
from tba.snapshots.publish import DELTA, FULL, MAX_FILE_BYTES, Part, part_stem, put_encoded, put_tensors
from tba.store import ObjectStore
from tba.trainer.channel import Channel
from tba.trainer.partmessages import ORDER, Encode, Encoded, Failed, Put, Reply, Settle, Stored


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What this rank put of a snapshot that was published."""

    key: str  # of the manifest
    entries: Sequence[TensorEntry]
    tensors: Mapping[str, Tensor]


class Uploader:
    """One publish at a time. Beside what was staged it holds what it put of the publish before, as rank 0 says."""

    def __init__(
        self,
        store: ObjectStore,
        channel: Channel,
        *,
        rank: int,
        on_loss: Callable[[BaseException], None],
        num_threads: int | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """`on_loss`: called in the thread when it can serve rank 0 no more, who would wait for hours to hear so.

        `num_threads`: that encode; null: of a process that has the host for itself.
        """
        self._store = store
        self._channel = channel
        self._rank = rank
        self._on_loss = on_loss
        self._num_threads = num_threads
        self._max_file_bytes = max_file_bytes
        self._kept: _Kept | None = None
        self._publish: Beside[None] | None = None

    def join(self) -> None:
        """Wait for the end of the publish before. Raises: torch's DistNetworkError if rank 0 has gone."""
        if self._publish is not None:
            self._publish.result()

    def start(self, staged: Mapping[str, Tensor]) -> None:
        """Serve rank 0's orders for a publish of these host tensors, which nobody may change from now on."""
        self.join()
        self._publish = Beside("publish", lambda: self._run(staged))

    def _run(self, staged: Mapping[str, Tensor]) -> None:
        try:
            self._serve(staged)
        except BaseException as error:
            self._on_loss(error)
            raise

    def _serve(self, staged: Mapping[str, Tensor]) -> None:
        work = _Publish(
            self._store,
            staged,
            self._kept,
            rank=self._rank,
            num_threads=self._num_threads,
            max_file_bytes=self._max_file_bytes,
        )
        while True:
            order = ORDER.validate_json(self._channel.receive())
            if isinstance(order, Settle):
                self._kept = work.kept(order.base)
                return
            self._channel.send(_answer(work, order).model_dump_json())


class _Publish:
    """The part of one snapshot, over all tries to publish it."""

    def __init__(
        self,
        store: ObjectStore,
        staged: Mapping[str, Tensor],
        base: _Kept | None,
        *,
        rank: int,
        num_threads: int | None,
        max_file_bytes: int,
    ) -> None:
        self._store, self._staged, self._base = store, staged, base
        self._rank, self._num_threads, self._max_file_bytes = rank, num_threads, max_file_bytes
        self._encoded: EncodedPart | None = None
        self._put: tuple[str, Part] | None = None

    def encode(self, order: Encode) -> Encoded:
        """Raises: CorruptObject if what was kept has changed in memory."""
        base = self._base
        if base is None or base.key != order.base:
            return Encoded(num_bytes=None)
        self._encoded = encode_part(
            base.key,
            base.entries,
            base.tensors,
            self._staged,
            max_bytes=order.max_bytes,
            num_threads=self._num_threads,
        )
        return Encoded(num_bytes=None if self._encoded is None else self._encoded.num_bytes)

    def put(self, order: Put) -> Stored:
        """Raises: StoreUnavailable, AccessDenied, UserError."""
        failpoint("part.before_put")
        stem = part_stem(DELTA if order.encoding == "delta" else FULL, self._rank)
        limit = self._max_file_bytes
        if order.encoding == "full":
            part = put_tensors(self._store, order.key, self._staged, stem=stem, max_file_bytes=limit)
        elif self._encoded is not None:
            part = put_encoded(self._store, order.key, self._encoded, stem=stem, max_file_bytes=limit)
        else:
            raise RuntimeError("rank 0 ordered a delta that was not encoded before")
        self._put = order.key.path, part
        failpoint("part.after_put")
        return Stored(files=part.files, tensors=part.tensors)

    def kept(self, key: str | None) -> _Kept | None:
        """What a delta on `key` builds on; None if that is not what was put last."""
        if key is None or self._put is None or self._put[0] != key:
            return None
        return _Kept(key, self._put[1].tensors, self._staged)


def _answer(work: _Publish, order: Encode | Put) -> Reply:
    try:
        return work.encode(order) if isinstance(order, Encode) else work.put(order)
    except Exception as error:  # the top of this rank's part: rank 0 decides what becomes of all
        return Failed.of(error)
