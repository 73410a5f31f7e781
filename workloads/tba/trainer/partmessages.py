"""What rank 0 and a rank that uploads a part of each snapshot say to each other while one is published (`parts`)."""

import traceback
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from tba.contracts.base import Contract
from tba.contracts.errors import CorruptObject, StoreUnavailable, UserError
from tba.contracts.keys import WeightsKey
from tba.contracts.records import FileEntry, TensorEntry
from tba.snapshots.publish import Part
from tba.store import AccessDenied


class Encode(Contract):
    """Make the difference of what was staged from what was published as `base`. Answered by Encoded."""

    kind: Literal["encode"] = "encode"
    base: str
    """Manifest key."""
    max_bytes: float
    """Of all parts together."""


class Put(Contract):
    """Write the data objects: of all that was staged, or of the difference made last. Answered by Stored."""

    kind: Literal["put"] = "put"
    version: int
    epoch: int
    nonce: str
    encoding: Literal["full", "delta"]

    @property
    def key(self) -> WeightsKey:
        """Below which."""
        return WeightsKey(self.version, self.epoch, self.nonce)


class Settle(Contract):
    """The publish is over. Not answered."""

    kind: Literal["settle"] = "settle"
    base: str | None
    """Manifest key of what was staged, to be kept for the next difference; null: keep nothing."""


class Encoded(Contract):
    """A difference is there."""

    kind: Literal["encoded"] = "encoded"
    num_bytes: int | None
    """null: there is none, for it is too large or the base is not here."""


class Stored(Contract):
    """Data objects are in the bucket."""

    kind: Literal["stored"] = "stored"
    files: list[FileEntry]
    tensors: list[TensorEntry]

    @property
    def part(self) -> Part:
        """As rank 0 merges it."""
        return Part(self.files, self.tensors)


class Failed(Contract):
    """What was asked for could not be done."""

    kind: Literal["failed"] = "failed"
    error: Literal["StoreUnavailable", "AccessDenied", "UserError", "CorruptObject", "other"]
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """As rank 0 is told."""
        for name, kind in _KINDS.items():
            if isinstance(error, kind):
                return cls(error=name, text=str(error))
        return cls(error="other", text="".join(traceback.format_exception(error)))

    def exception(self, rank: int) -> Exception:
        """As rank 0 raises it: of the kind that its own failure would have been."""
        kind = _KINDS.get(self.error, RuntimeError)
        return kind(f"trainer rank {rank}, which uploads a part of each snapshot: {self.text}")


_KINDS: dict[Literal["StoreUnavailable", "AccessDenied", "UserError", "CorruptObject", "other"], type[Exception]] = {
    "StoreUnavailable": StoreUnavailable,
    "AccessDenied": AccessDenied,  # before UserError, which it is too
    "UserError": UserError,
    "CorruptObject": CorruptObject,
}
Order = Encode | Put | Settle
Reply = Encoded | Stored | Failed
ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])
