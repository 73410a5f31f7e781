"""Rows in, on the loop's side: what has arrived becomes part of the learner, the bookkeeping and the ingest log.

A bad shard is quarantined, never fatal. What is ingested and what is logged never differ: both change here alone, and
so do the live settings by which batches are drawn.
"""

import time
from collections.abc import Callable

from tba import telemetry
from tba.contracts.config import LiveConfig
from tba.contracts.errors import CorruptObject
from tba.contracts.records import IngestEntry
from tba.log import SHARDS_INGESTED, log
from tba.protocol.bookkeeping import Bookkeeping
from tba.run_record import differences
from tba.trainer.checkpoint import LoopFacts
from tba.trainer.ingest import Arrival, Ingestor
from tba.trainer.journal import Journal
from tba.trainer.learner import Learner
from tba.trainer.reporter import Reporter


class Intake:
    """Takes arrivals between two steps. Not thread-safe: the loop's alone."""

    def __init__(
        self,
        learner: Learner,
        ingestor: Ingestor,
        ingest_log: Journal,
        report: Reporter,
        *,
        facts: LoopFacts,
        begun_with: LiveConfig,
        live: Callable[[], LiveConfig],
    ) -> None:
        """`begun_with`: the settings that run.json tells. `live`: those of now."""
        self._learner = learner
        self._ingestor = ingestor
        self._ingest_log = ingest_log
        self._report = report
        self._live = live
        self.followed = facts.live or begun_with
        """The settings by which rows are kept and batches are drawn, as the ingest log tells them."""
        self._synced_step = -1
        # AtSync: the next rows join the pool of this wait, which a checkpoint may have cut, in place of replacing it.
        self._extends_sync = any(entry.synced for entry in facts.carried)
        self.last_arrival = time.monotonic()
        """When rows last arrived (monotonic seconds)."""
        self.arrived_at = time.time()
        """The same in unix seconds."""
        self.shards_since_commit = 0
        """Shards taken since `latest` was last committed: a reason for a new window."""
        self.foreign = set(facts.foreign)
        """Keys below `shards/` that are no shards, told once a run."""
        self.open_entries: list[IngestEntry] = []
        """Of the ingest log, since the last step: a checkpoint carries them, for they belong to the next step."""
        for entry in facts.carried:
            self._log(entry)

    def follow(self) -> LiveConfig:
        """The settings for what comes next; a change is logged, so that a replay makes it at the same place."""
        live = self._live()
        if live != self.followed:
            before, now = (each.model_dump(mode="json", by_alias=True) for each in (self.followed, live))
            self._log(self._entry(key="", num_rows=0, live=live))
            self._report.event("settings", "; ".join(differences(before, now)))
            self.followed = live
            self._learner.buffer.set_max_trajectories(live.buffer.max_trajectories)
        return live

    def take(self, book: Bookkeeping, *, waiting: bool, timeout_seconds: float = 0.0) -> Bookkeeping:
        """Ingest what has arrived; returns the bookkeeping after it.

        Continuous: at once. AtSync: only right after a publish, or while the trainer waits (the paper's semantics).
        """
        at_sync = self._live().sync.ingest == "AtSync"
        published = self._published_step()
        if at_sync and not waiting and self._synced_step == published:
            return book
        self._synced_step = published
        arrivals = self._ingestor.take(timeout_seconds)
        if not arrivals:
            return book
        for arrival in arrivals:
            book = self._accept(arrival, book)
        self._ingestor.ingested(arrivals)
        self.last_arrival, self.arrived_at = time.monotonic(), time.time()
        if at_sync:
            self._sync(waiting)
        log.debug(SHARDS_INGESTED, shards=len(arrivals), rows=self._learner.counters.ingested_rows)
        return book

    def stepped(self) -> None:
        """A step has been taken: what comes now belongs to the next one."""
        self.open_entries = []
        self._extends_sync = False

    def quarantine(self, key: str, reason: str) -> None:
        """Count and tell a refused shard."""
        self._learner.counters.quarantined_shards += 1
        telemetry.TRAJECTORIES.labels("quarantined").inc()
        self._report.quarantined(key, reason)

    def _sync(self, waiting: bool) -> None:
        extend = self._extends_sync
        self._learner.sampler.on_sync(self._learner.buffer, extend=extend)
        self._log(self._entry(key="", num_rows=0, synced=True, extended=extend))
        self._extends_sync = waiting

    def _accept(self, arrival: Arrival, book: Bookkeeping) -> Bookkeeping:
        if arrival.key in self.foreign or (arrival.shard_id is not None and book.contains(arrival.shard_id)):
            return book
        num_rows, reason = self._learn(arrival, book)
        if arrival.shard_id is None:
            self.foreign.add(arrival.key)
        else:
            book = book.ingest(arrival.shard_id)  # a quarantined identity counts as ingested
            self._log(self._entry(key=arrival.key, num_rows=num_rows, quarantined=reason or None))
        if reason:
            self.quarantine(arrival.key, reason)
        else:
            self.shards_since_commit += 1
        return book

    def _learn(self, arrival: Arrival, book: Bookkeeping) -> tuple[int, str]:
        """(rows that entered the buffer's count, why none did)."""
        if arrival.batch is None:
            return 0, arrival.reason
        try:
            added = self._learner.ingest_shard(arrival.key, arrival.batch, book, now=time.time())
        except CorruptObject as error:
            return 0, str(error)
        telemetry.TRAJECTORIES.labels("ingested").inc(len(arrival.batch))
        telemetry.TRAJECTORIES.labels("duplicate").inc(added.duplicates)
        telemetry.TRAJECTORIES.labels("failed").inc(added.failed)
        self._report.delivered(arrival.batch)
        return len(arrival.batch), ""

    def _published_step(self) -> int:
        k = self._live().sync.interval_steps
        return self._learner.step // k * k

    def _entry(self, **fields: object) -> IngestEntry:
        return IngestEntry.model_validate({"before_step": self._learner.step + 1, **fields})

    def _log(self, entry: IngestEntry) -> None:
        self.open_entries.append(entry)
        self._ingest_log.append(entry)
