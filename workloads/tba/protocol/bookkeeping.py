"""What the trainer remembers of its run, as one frozen value: the core of the training loop and of a checkpoint.

```
begun(epoch) ─┐
              ├─► ingest(shard ids) ─► stepped() ─► … ─► manifest(…) ─► checkpointed(key)
restored(…) ──┘                                             │
      ▲                                                     ▼
      └───────────────── after a crash ─────────── CheckpointManifest in the bucket
```
Ingested identities, step and lineage travel in the same manifest as optimizer and sampler, so a rollback takes all of
them back together: that is what makes ingestion exactly-once in effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from tba.contracts.records import CheckpointManifest, FileEntry, IngestState, Lineage, PolicyId, ShardId
from tba.protocol import intervals, lineage

EVAL_SCORES = 64
"""Evaluations that a checkpoint carries: more than end between two checkpoints."""


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """State of one trainer between two optimizer steps. Every method returns a new value."""

    epoch: int
    step: int = 0
    """Optimizer steps done."""
    ingest_state: IngestState = field(default_factory=IngestState)
    lineage: Lineage = field(default_factory=Lineage)
    checkpoint: str | None = None
    """Manifest key of the newest committed checkpoint: the parent of the next one."""
    ingest_log_seq: int = 0
    """Objects of this epoch's ingest log that belong to this state."""
    metrics_log_seq: int = 0
    wall_seconds: float = 0.0
    """Training time up to this step, over all attempts."""
    scores: tuple[tuple[int, float], ...] = ()
    """(step, score) of the newest complete evaluations of the surviving run, by step. A tuple: states are hashed."""

    @classmethod
    def begun(cls, epoch: int) -> Self:
        """A run that holds no checkpoint yet starts at step 0, whatever epoch it took."""
        return cls(epoch=epoch, lineage=lineage.surviving(None, epoch))

    @classmethod
    def restored(cls, manifest: CheckpointManifest, key: str, epoch: int) -> Self:
        """Resume from the checkpoint at `key` as `epoch`; logs of the new epoch start empty.

        Raises: ValueError if `epoch` is not newer than the checkpoint's, or its intervals are malformed.
        """
        if epoch <= manifest.epoch:
            raise ValueError(f"epoch must be > {manifest.epoch}, the checkpoint's, got {epoch}: take over first")
        intervals.IngestSet(manifest.ingest)
        return cls(
            epoch=epoch,
            step=manifest.step,
            ingest_state=manifest.ingest,
            lineage=lineage.surviving(manifest, epoch),
            checkpoint=key,
            wall_seconds=manifest.wall_seconds,
            scores=tuple(sorted(manifest.eval_scores.items())),
        )

    @property
    def eval_score(self) -> float | None:
        """Score of the newest evaluated step."""
        return self.scores[-1][1] if self.scores else None

    def contains(self, shard_id: ShardId) -> bool:
        """Whether the shard is ingested, or quarantined, in this state."""
        return intervals.contains(self.ingest_state, shard_id)

    def ingest(self, *shard_ids: ShardId) -> Self:
        """Count shards as ingested (quarantined ones too). One call with many costs less than many calls.

        Raises: ValueError if one is in already.
        """
        return replace(self, ingest_state=intervals.with_ingested(self.ingest_state, *shard_ids))

    def swept(self, lowest_unswept_window: int) -> Self:
        """Record `Windows.durable(…)`: windows below are listed and all their shards ingested.

        It falls while a late shard of an old window waits to be ingested. Raises: ValueError if it is negative.
        """
        if lowest_unswept_window < 0:
            raise ValueError(f"lowest_unswept_window must be >= 0, got {lowest_unswept_window}")
        swept = IngestState.model_construct(
            intervals=self.ingest_state.intervals, lowest_unswept_window=lowest_unswept_window
        )
        return replace(self, ingest_state=swept)

    def stepped(self, wall_seconds: float = 0.0) -> Self:
        """One more optimizer step, which took `wall_seconds` since the one before."""
        return replace(self, step=self.step + 1, wall_seconds=self.wall_seconds + wall_seconds)

    def logged(self, *, ingest_log_seq: int, metrics_log_seq: int) -> Self:
        """Objects of this epoch's logs that belong to this state. Raises: ValueError if a count would fall."""
        if ingest_log_seq < self.ingest_log_seq or metrics_log_seq < self.metrics_log_seq:
            raise ValueError(
                f"log counts never fall, got ingest {ingest_log_seq} after {self.ingest_log_seq} "
                f"and metrics {metrics_log_seq} after {self.metrics_log_seq}"
            )
        return replace(self, ingest_log_seq=ingest_log_seq, metrics_log_seq=metrics_log_seq)

    def evaluated(self, step: int, score: float) -> Self:
        """A complete evaluation of the surviving run's weights of `step`."""
        scores = sorted({**dict(self.scores), step: score}.items())
        return replace(self, scores=tuple(scores[-EVAL_SCORES:]))

    def checkpointed(self, key: str) -> Self:
        """`latest` names the checkpoint at `key` now: the next one has it as its parent."""
        return replace(self, checkpoint=key)

    def effective_version(self, policy: PolicyId) -> int:
        """Step of the surviving run that `policy` stands for (see `lineage.effective_version`)."""
        return lineage.effective_version(self.lineage, policy)

    def staleness(self, policy: PolicyId) -> int:
        """Optimizer steps done since the weights of `policy`, never negative for a policy that `knows` accepts."""
        return self.step - self.effective_version(policy)

    def knows(self, policy: PolicyId) -> bool:
        """Whether `policy` can exist: spans are claims, and one of a later epoch or step is false or makes us stale."""
        return 1 <= policy.epoch <= self.epoch and policy.version >= 0 and self.staleness(policy) >= 0

    def manifest(self, nonce: str, files: Sequence[FileEntry]) -> CheckpointManifest:
        """The record of this state over the data objects `files`, to be written after them."""
        return CheckpointManifest(
            epoch=self.epoch,
            step=self.step,
            nonce=nonce,
            parent=self.checkpoint,
            files=list(files),
            ingest=self.ingest_state,
            lineage=self.lineage,
            ingest_log_seq=self.ingest_log_seq,
            metrics_log_seq=self.metrics_log_seq,
            wall_seconds=self.wall_seconds,
            eval_score=self.eval_score,
            eval_scores=dict(self.scores),
        )
