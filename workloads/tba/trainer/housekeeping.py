"""What the trainer does now and then beside training: new windows, a look at the fence, the sweep of garbage."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tba.contracts.config import LiveConfig
from tba.contracts.errors import CorruptObject
from tba.contracts.records import ShardId
from tba.log import OBJECTS_SWEPT, STORAGE_FAILED, log
from tba.protocol.bookkeeping import Bookkeeping
from tba.protocol.garbage import Retention
from tba.protocol.latest import window_advanced
from tba.store import ObjectStore
from tba.trainer.background import Background
from tba.trainer.checkpoint import held_shards
from tba.trainer.committer import Committer
from tba.trainer.garbage import Sweeper
from tba.trainer.intake import Intake
from tba.trainer.learner import Learner

WINDOW_SECONDS = 30.0
FENCE_SECONDS = 10.0
GARBAGE_SECONDS = 60.0


@dataclass(slots=True)
class _Clocks:
    """When each was done last (monotonic seconds)."""

    window: float = field(default_factory=time.monotonic)
    fence: float = field(default_factory=time.monotonic)
    garbage: float = field(default_factory=time.monotonic)


class Housekeeping:
    """`tick` is for the loop, between two steps; the work is done in two threads, `commits` and `garbage`."""

    def __init__(
        self,
        store: ObjectStore,
        committer: Committer,
        learner: Learner,
        *,
        live: Callable[[], LiveConfig],
        book: Callable[[], Bookkeeping],
        give_up_seconds: float,
    ) -> None:
        self._store = store
        self._committer = committer
        self._learner = learner
        self._live = live
        self._book = book
        self._clocks = _Clocks()
        self.commits = Background("commit", give_up_seconds=give_up_seconds)
        self.garbage = Background("garbage", give_up_seconds=give_up_seconds)
        self.sweeper = Sweeper(store, committer)

    def tick(self, intake: Intake) -> None:
        """Begin what is due."""
        now = time.monotonic()
        if intake.shards_since_commit and now - self._clocks.window > WINDOW_SECONDS and not self.commits.busy:
            self._clocks.window, intake.shards_since_commit = now, 0
            self.commits.submit(lambda: self._committer.commit(window_advanced))
        elif now - self._clocks.fence > FENCE_SECONDS and not self.commits.busy:
            self._clocks.fence = now
            self.commits.submit(self._committer.check)
        self.sweep_if_due()

    def sweep_if_due(self) -> None:
        """Also for a loop that waits for storage: if that is full, what may be swept is the space that it waits for."""
        now = time.monotonic()
        if now - self._clocks.garbage > GARBAGE_SECONDS and not self.garbage.busy:
            self._clocks.garbage = now
            self.garbage.submit(self.sweep)

    def sweep(self) -> None:
        """Delete what nothing needs any more."""
        live = self._live()
        try:
            swept = self.sweeper.sweep(
                Retention.of(live.sync, live.storage), held_by=self._held_by, scores=dict(self._book().scores)
            )
        except CorruptObject as error:
            log.warning(STORAGE_FAILED, task="garbage", error=str(error))
            return
        if swept.num_objects:
            log.info(OBJECTS_SWEPT, objects=swept.num_objects, total_bytes=swept.total_bytes)

    def _held_by(self, checkpoint_key: str) -> Collection[ShardId]:
        """Shards whose rows a checkpoint's buffer holds, or ("") the live one's."""
        if not checkpoint_key:
            return list(self._learner.shard_paths)
        return held_shards(self._store, checkpoint_key)
