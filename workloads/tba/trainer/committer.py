"""The one writer of `latest` in a process: drives `tba.protocol.commit` against storage and remembers being fenced."""

import threading
from typing import Self

from tba.contracts.errors import Fenced, StoreUnavailable
from tba.contracts.keys import LATEST, new_nonce
from tba.contracts.records import Latest
from tba.failpoints import failpoint
from tba.protocol.commit import Done, FencedOut, Plan, Read, Swap, Transition, deleted
from tba.store.protocol import Conflict, NotFound, ObjectStore

MAX_TRIES = 32
"""Swaps of one commit that may come back unclear. Only competing take-overs and collisions cause any."""


class Committer:
    """Serialises all compare-and-swaps of this trainer. Thread-safe; fenced once is fenced for good."""

    def __init__(self, store: ObjectStore, latest: Latest, etag: str) -> None:
        """Use `take_over`. `latest` is the body this process committed, at `etag`."""
        self._store = store
        self._epoch = latest.epoch
        self._latest = latest
        self._etag = etag
        self._fenced_by: int | None = None
        self._lock = threading.Lock()

    @classmethod
    def take_over(cls, store: ObjectStore) -> Self:
        """Become the trainer of the run: the epoch before is fenced from now on.

        Raises: StoreUnavailable, CorruptObject; RunEnded (a ValueError) if the run is Complete or Failed.
        """
        done = _drive(store, Plan.take_over(new_nonce()).start())
        assert isinstance(done, Done), "a take-over accepts any epoch"
        return cls(store, done.latest, done.etag)

    @property
    def epoch(self) -> int:
        """This trainer's epoch."""
        return self._epoch

    @property
    def latest(self) -> Latest:
        """The newest body this process knows of."""
        return self._latest

    @property
    def fenced(self) -> bool:
        """Whether a newer trainer has been seen."""
        return self._fenced_by is not None

    def commit(self, transition: Transition) -> Latest:
        """Apply `transition(current, nonce)` to `latest`; it may run several times and must be pure.

        Raises: Fenced, now and ever after, once a newer trainer has taken over; StoreUnavailable, after which the
        commit may or may not have happened; ValueError if the transition refuses; UserError if the run was deleted.
        """
        with self._lock:
            self._refuse_if_fenced()
            start = Plan(new_nonce(), transition, self._epoch).start()
            # Nobody else writes as this epoch, so what we remember is current unless we are fenced: saves a GET.
            return self._settle(_drive(self._store, start, known=(self._latest, self._etag)))

    def check(self) -> Latest:
        """Read `latest` again. Raises: Fenced if a newer trainer has taken over; StoreUnavailable."""
        with self._lock:
            self._refuse_if_fenced()
            current, etag = _read(self._store)
            if current is None or etag is None:
                raise deleted(self._epoch)
            if current.epoch < self._epoch:
                raise ValueError(
                    f"latest must be of epoch {self._epoch} or later, got {current}: "
                    "it was overwritten without a condition"
                )
            newer = current.epoch > self._epoch
            return self._settle(FencedOut(current) if newer else Done(current, etag))

    def _settle(self, end: Done | FencedOut) -> Latest:
        self._latest = end.latest
        if isinstance(end, FencedOut):
            self._fenced_by = end.latest.epoch
            self._refuse_if_fenced()
        else:
            self._etag = end.etag
        return end.latest

    def _refuse_if_fenced(self) -> None:
        if self._fenced_by is not None:
            raise Fenced(
                f"this trainer (epoch {self._epoch}) may publish nothing more: a newer trainer took over "
                f"as epoch {self._fenced_by}; leave the run to it"
            )


def _drive(store: ObjectStore, state: Read, known: tuple[Latest, str] | None = None) -> Done | FencedOut:
    """Carry out what each state asks for until the commit has ended."""
    after_read = state.seen(*(known or _read(store)))
    while isinstance(after_read, Swap):
        swapped = _swap(store, after_read)
        if isinstance(swapped, Done):
            return swapped
        if swapped.tries >= MAX_TRIES:
            raise StoreUnavailable(
                f"latest could not be swapped: {swapped.tries} tries conflicted, and none is ours; "
                "check that storage honours If-Match (`tba storage check`) and that one trainer runs"
            )
        after_read = swapped.seen(*_read(store))
    return after_read


def _swap(store: ObjectStore, swap: Swap) -> Done | Read:
    failpoint("commit.before_cas")
    try:
        etag = store.cas(LATEST, swap.body.to_json(), swap.etag)
    except Conflict:
        return swap.unclear()
    failpoint("commit.after_cas")
    return swap.landed(etag)


def _read(store: ObjectStore) -> tuple[Latest | None, str | None]:
    try:
        stored = store.get(LATEST)
    except NotFound:
        return None, None
    return Latest.parse(stored.data), stored.etag
