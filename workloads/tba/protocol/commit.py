"""One compare-and-swap commit of `latest` as a state machine without I/O.

```
            ┌────────────── unclear: conflict, or no reply ──────────────┐
            ▼                                                            │
 start ─► Read ── current.nonce is mine (lost reply) ──► Done            │
            │ ── current.epoch > mine ────────────────► FencedOut        │
            └─ else apply the transition ─────────────► Swap ── landed ──┴─► Done
```
The driver (`tba.trainer.committer`) only carries out what a state asks for. A plan keeps one nonce for all its tries:
if an early try lands late, the later ones conflict, and the nonce tells whose body stands there. A take-over is a plan
without an epoch: it accepts any, and its transition raises it by one, so a competitor that loses goes on on top.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tba.contracts.errors import UserError
from tba.contracts.records import Latest
from tba.protocol.latest import first, taken_over

Transition = Callable[[Latest, str], Latest]
"""(current, nonce) -> the next body. Pure: it may run several times."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be committed. `nonce` must be fresh: 128 random bits of this plan alone."""

    nonce: str
    transition: Transition | None
    """None: take over."""
    epoch: int | None
    """Epoch of the committing trainer; None: take over."""

    @classmethod
    def take_over(cls, nonce: str) -> "Plan":
        """Become the trainer: epoch + 1, or the first body of the run."""
        return cls(nonce, None, None)

    def start(self) -> "Read":
        """The state to begin with; a driver that remembers `latest` may answer the read from memory."""
        return Read(self)


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for the current body of `latest`."""

    plan: Plan
    tries: int = 0

    def seen(self, current: Latest | None, etag: str | None) -> "Swap | Done | FencedOut":
        """Go on with what stands there; None: there is no `latest` yet.

        Raises: ValueError if the transition refuses, or storage lost a committed body; UserError if it is gone.
        """
        if current is None or etag is None:
            return self._create()
        if current.nonce == self.plan.nonce:
            return Done(current, etag)
        if self.plan.epoch is None or self.plan.transition is None:
            return Swap(self, taken_over(current, self.plan.nonce), etag)
        if current.epoch > self.plan.epoch:
            return FencedOut(current)
        if current.epoch < self.plan.epoch:
            raise ValueError(
                f"epoch of latest never falls, got {current.epoch} after {self.plan.epoch}: "
                "it was overwritten without a condition; run `tba storage check`"
            )
        return Swap(self, self.plan.transition(current, self.plan.nonce), etag)

    def _create(self) -> "Swap":
        if self.plan.epoch is not None:
            raise deleted(self.plan.epoch)
        return Swap(self, first(self.plan.nonce), None)


@dataclass(frozen=True, slots=True)
class Swap:
    """Asks to put `body` if the object is still at `etag` (None: if it does not exist)."""

    read: Read
    body: Latest
    etag: str | None

    def landed(self, etag: str) -> "Done":
        """Storage confirmed."""
        return Done(self.body, etag)

    def unclear(self) -> Read:
        """Storage refused, or did not say: only what stands there can tell."""
        return Read(self.read.plan, self.read.tries + 1)


@dataclass(frozen=True, slots=True)
class Done:
    """The commit happened, once; `latest` was this body then."""

    latest: Latest
    etag: str


@dataclass(frozen=True, slots=True)
class FencedOut:
    """A newer trainer stands in `latest`: this one must stop. Whether an unconfirmed try landed before is open."""

    latest: Latest


def deleted(epoch: int) -> UserError:
    """The end of a trainer whose `latest` is gone. No crash: one that is tried again would begin anew at step 0."""
    return UserError(
        f"latest is gone, which epoch {epoch} had committed: the run was deleted or overwritten while it trained. "
        "Restore it, or start the trainer again for a new run from step 0"
    )
