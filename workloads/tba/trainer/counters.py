"""What the trainer counts over the whole life of a run; part of every checkpoint.

Totals are for ever. The table of searchers holds those heard of lately: processes come and go by the thousand.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.contracts.history import LengthRow, SearcherRow
from tba.shards import ShardBatch
from tba.trainer.rows import SCORED

_PLAIN = (
    "trained_rows",
    "trained_tokens",
    "ingested_rows",
    "generated_tokens",
    "duplicate_rows",
    "failed_rows",
    "quarantined_shards",
    "trained_groups",
    "signal_groups",
    "wall_seconds",
)

RECENT_POLICIES = 1000
"""Policies of a searcher that are remembered one by one; one that comes back after so many others counts again."""
FORGET_SECONDS = 86_400.0
"""A searcher process not heard of for so long leaves the table. The history has its last row."""


@dataclass(slots=True)
class SearcherTally:
    """One searcher process as seen through its shards."""

    searcher: str
    shards: int = 0
    rows: int = 0
    failed: int = 0
    """Of the rows, those without a reward."""
    tokens: int = 0
    num_policies: int = 0
    """Distinct policies seen in its spans."""
    newest_version: int = 0
    recent: dict[tuple[int, int], None] = field(default_factory=dict)
    """(epoch, version) of its last policies, last seen last."""
    first_seen: float = 0.0
    last_seen: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)
    written_shards: int = field(default=0, compare=False)
    """`shards` when its row was last taken; of this process, as the log is: a new epoch writes all rows again."""

    def add(self, batch: ShardBatch, now: float) -> None:
        """Count one shard."""
        self.shards += 1
        self.rows += len(batch)
        self.failed += int((batch.outcomes != SCORED).sum())
        self.tokens += int(batch.response_offsets[-1])
        for policy in sorted(set(zip(batch.span_epochs.tolist(), batch.span_versions.tolist(), strict=True))):
            self._add_policy(policy)
        self.first_seen = self.first_seen or now
        self.last_seen = now
        stats = batch.header.stats
        if stats.get("up_seconds", 0.0) >= self.stats.get("up_seconds", 0.0):  # else an older shard that came late
            self.stats = dict(stats)

    def _add_policy(self, policy: tuple[int, int]) -> None:
        self.num_policies += policy not in self.recent
        self.newest_version = max(self.newest_version, policy[1])
        self.recent.pop(policy, None)
        self.recent[policy] = None
        if len(self.recent) > RECENT_POLICIES:
            del self.recent[next(iter(self.recent))]


@dataclass(slots=True)
class Counters:
    """Cumulative counts; equal on a resumed run and on one that was never interrupted."""

    trained_rows: int = 0
    trained_tokens: int = 0
    ingested_rows: int = 0
    generated_tokens: int = 0
    duplicate_rows: int = 0
    failed_rows: int = 0
    quarantined_shards: int = 0
    trained_groups: int = 0
    signal_groups: int = 0
    """Of them, those whose rewards differ."""
    wall_seconds: float = 0.0
    generated_lengths: Counter[int] = field(default_factory=Counter)
    trained_lengths: Counter[int] = field(default_factory=Counter)
    searchers: dict[str, SearcherTally] = field(default_factory=dict)
    fresh_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=100_000))
    """Rewards ingested since the last step, before de-duplication."""
    _written_rows: tuple[int, int] = field(default=(-1, -1), compare=False)

    def ingested(self, batch: ShardBatch, now: float) -> None:
        """Count a shard's rows before de-duplication."""
        self.ingested_rows += len(batch)
        self.generated_tokens += int(batch.response_offsets[-1])
        self.generated_lengths.update(np.diff(batch.response_offsets)[batch.outcomes == SCORED].tolist())
        self.fresh_rewards.extend(batch.rewards[batch.outcomes == SCORED].tolist())
        header = batch.header
        self.searchers.setdefault(header.incarnation, SearcherTally(header.searcher)).add(batch, now)

    def take_reward_mean(self) -> float | None:
        """Mean of the rewards since the last call, or None if there were none."""
        if not self.fresh_rewards:
            return None
        mean = sum(self.fresh_rewards) / len(self.fresh_rewards)
        self.fresh_rewards.clear()
        return mean

    def take_searcher_rows(self, *, epoch: int, step: int, now: float) -> list[SearcherRow]:
        """History rows of the searcher processes that have delivered since the last call; then forgets silent ones."""
        rows = [
            SearcherRow(
                epoch=epoch,
                step=step,
                time=now,
                searcher=t.searcher,
                incarnation=incarnation,
                shards=t.shards,
                rows=t.rows,
                failed=t.failed,
                tokens=t.tokens,
                versions=t.num_policies,
                newest_version=t.newest_version,
                first_seen=t.first_seen,
                last_seen=t.last_seen,
                stats=t.stats,
            )
            for incarnation, t in self.searchers.items()
            if t.shards != t.written_shards
        ]
        self.searchers = {i: t for i, t in self.searchers.items() if now - t.last_seen <= FORGET_SECONDS}
        for tally in self.searchers.values():
            tally.written_shards = tally.shards
        return rows

    def take_length_row(self, *, epoch: int, step: int, now: float) -> LengthRow | None:
        """History row of the response-length histograms, or None if they are those of the last call."""
        counted = self.ingested_rows, self.trained_rows
        if counted == self._written_rows:
            return None
        self._written_rows = counted
        return LengthRow(
            epoch=epoch, step=step, time=now, generated=self.generated_lengths, trained=self.trained_lengths
        )

    def state(self) -> dict[str, Any]:
        """JSON of everything."""
        return {name: getattr(self, name) for name in _PLAIN} | {
            "generated_lengths": list(self.generated_lengths.items()),
            "trained_lengths": list(self.trained_lengths.items()),
            "fresh_rewards": list(self.fresh_rewards),
            "searchers": {
                name: {
                    "searcher": t.searcher,
                    "shards": t.shards,
                    "rows": t.rows,
                    "failed": t.failed,
                    "tokens": t.tokens,
                    "num_policies": t.num_policies,
                    "newest_version": t.newest_version,
                    "recent": list(t.recent),
                    "first_seen": t.first_seen,
                    "last_seen": t.last_seen,
                    "stats": t.stats,
                }
                for name, t in self.searchers.items()
            },
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Counters":
        """Undo `state`."""
        counters = cls()
        for name in _PLAIN:
            setattr(counters, name, state.get(name, 0))
        counters.generated_lengths.update({int(k): int(v) for k, v in state["generated_lengths"]})
        counters.trained_lengths.update({int(k): int(v) for k, v in state["trained_lengths"]})
        counters.fresh_rewards.extend(state["fresh_rewards"])
        for incarnation, tally in state["searchers"].items():
            recent = {(int(e), int(v)): None for e, v in tally["recent"]}
            counters.searchers[incarnation] = SearcherTally(**{**tally, "recent": recent})
        return counters
