"""Follows a live change of the way to a run's bucket (endpoint, region, addressing, CA) without a restart.

```
live.json or the CA's file: another location? ──► first contact: one request, by a client of its own, for run.json
        ├─ it is this run's ──────────────────────► the store's requests go there from now on
        └─ no answer, refused, another run ───────► everything stays as it was; asked again after a while
```

A thread of its own looks: the others may be waiting for the very storage that has moved.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Protocol

from tba.contracts.config import Storage
from tba.contracts.errors import StoreUnavailable, UserError
from tba.contracts.records import RunRecord
from tba.log import CONFIG_REFUSED, STORAGE_MOVED, log
from tba.run_record import find_run_record
from tba.store import ObjectStore

if TYPE_CHECKING:
    from tba.store.access import S3Location
    from tba.store.s3 import S3Store

LOOK_SECONDS = 2.0
RETRY_SECONDS = 5.0
"""A location that was not good is tried again so often: credentials or a CA may be on their way."""


class Movable(Protocol):
    """What is moved: an S3 store."""

    @property
    def location(self) -> "S3Location":
        """Where requests go now."""
        ...

    def relocate(self, location: "S3Location") -> None:
        """Send them elsewhere."""
        ...


class Follower:
    """Decides when a store moves: `look` does all, its caller says how often."""

    def __init__(
        self,
        store: Movable,
        wanted: Callable[[], "S3Location"],
        contact: Callable[["S3Location"], RunRecord | None],
        *,
        run_id: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`contact` reads the run's record there, once; `run_id` is None until the run is known, and any will do."""
        self._store = store
        self._wanted = wanted
        self._contact = contact
        self._run_id = run_id
        self._clock = clock
        self._refused: S3Location | None = None
        self._retry_at = 0.0
        self._told = ""

    def look(self) -> None:
        """Move if the settings name another location that holds the run."""
        try:
            wanted = self._wanted()
            if wanted == self._store.location:
                self._refused, self._told = None, ""
                return
            if wanted == self._refused and self._clock() < self._retry_at:
                return
            self._refused, self._retry_at = wanted, self._clock() + RETRY_SECONDS
            self._check(wanted, self._contact(wanted))
            self._store.relocate(wanted)
        except (UserError, StoreUnavailable) as error:
            self._tell(str(error))
        else:
            self._refused, self._told = None, ""
            log.info(STORAGE_MOVED, endpoint=wanted.endpoint, region=wanted.region, path_style=wanted.path_style)

    def _check(self, wanted: "S3Location", found: RunRecord | None) -> None:
        known = self._run_id()
        if known is None or (found is not None and found.run_id == known):
            return
        holds = "no run" if found is None else f"the run {found.run_id}"
        raise UserError(
            f"storage.endpoint must serve the objects of this run ({known}), got {holds} at {wanted.uri} of "
            f"{wanted.endpoint or 'AWS'}: correct it; to move a run's objects, suspend it first"
        )

    def _tell(self, error: str) -> None:
        if error != self._told:
            self._told = error
            log.error(CONFIG_REFUSED, error=f"storage stays where it was: {error}")


@contextmanager
def following(
    store: ObjectStore, settings: Callable[[], Storage], *, run_id: Callable[[], str | None]
) -> Iterator[None]:
    """Keep `store` where `settings` say, in the background. Nothing to do for a store in a directory."""
    if not store.uri.startswith("s3://"):
        yield
        return
    # Imported here: a run in a directory needs neither obstore nor boto3.
    from tba.store.s3 import S3Store

    assert isinstance(store, S3Store)
    follower = _follower(store, settings, run_id)
    stop = threading.Event()

    def follow() -> None:
        while not stop.wait(LOOK_SECONDS):
            follower.look()

    thread = threading.Thread(target=follow, name="tba-relocation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(1.0)  # a first contact in flight ends by its own time limit, or with the process


def _follower(store: "S3Store", settings: Callable[[], Storage], run_id: Callable[[], str | None]) -> Follower:
    from tba.store.access import locate

    def wanted() -> "S3Location":
        storage = settings()
        return locate(
            store.uri,
            endpoint=storage.endpoint,
            region=storage.region,
            force_path_style=storage.force_path_style,
            ca_bundle=None,
            environ=os.environ,
        )

    def contact(location: "S3Location") -> RunRecord | None:
        with closing(store.trial(location)) as there:
            return find_run_record(there)

    return Follower(store, wanted, contact, run_id=run_id)
