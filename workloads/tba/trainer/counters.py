"""What the trainer counts over the whole life of a run; part of every checkpoint."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.contracts.history import LengthRow, SearcherRow
from tba.shards import ShardBatch

_PLAIN = (
    "trained_rows",
    "trained_tokens",
    "ingested_rows",
    "generated_tokens",
    "duplicate_rows",
    "failed_rows",
    "quarantined_shards",
    "wall_seconds",
)


@dataclass(slots=True)
class SearcherTally:
    """One searcher process as seen through its shards."""

    searcher: str
    shards: int = 0
    rows: int = 0
    tokens: int = 0
    policies: set[tuple[int, int]] = field(default_factory=set)
    first_seen: float = 0.0
    last_seen: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    def add(self, batch: ShardBatch, now: float) -> None:
        """Count one shard."""
        self.shards += 1
        self.rows += len(batch)
        self.tokens += int(batch.response_offsets[-1])
        self.policies.update(zip(batch.span_epochs.tolist(), batch.span_versions.tolist(), strict=True))
        self.first_seen = self.first_seen or now
        self.last_seen = now
        self.stats = dict(batch.header.stats)


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
    wall_seconds: float = 0.0
    generated_lengths: Counter[int] = field(default_factory=Counter)
    trained_lengths: Counter[int] = field(default_factory=Counter)
    searchers: dict[str, SearcherTally] = field(default_factory=dict)
    fresh_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=100_000))
    """Rewards ingested since the last step, before de-duplication."""

    def ingested(self, batch: ShardBatch, now: float) -> None:
        """Count a shard's rows before de-duplication."""
        self.ingested_rows += len(batch)
        self.generated_tokens += int(batch.response_offsets[-1])
        self.generated_lengths.update(np.diff(batch.response_offsets)[batch.outcomes == 0].tolist())
        self.fresh_rewards.extend(batch.rewards[batch.outcomes == 0].tolist())
        header = batch.header
        self.searchers.setdefault(header.incarnation, SearcherTally(header.searcher)).add(batch, now)

    def take_reward_mean(self) -> float | None:
        """Mean of the rewards since the last call, or None if there were none."""
        if not self.fresh_rewards:
            return None
        mean = sum(self.fresh_rewards) / len(self.fresh_rewards)
        self.fresh_rewards.clear()
        return mean

    def searcher_rows(self, *, epoch: int, step: int, now: float) -> list[SearcherRow]:
        """History rows, one a searcher process."""
        return [
            SearcherRow(
                epoch=epoch,
                step=step,
                time=now,
                searcher=t.searcher,
                incarnation=incarnation,
                shards=t.shards,
                rows=t.rows,
                tokens=t.tokens,
                versions=len(t.policies),
                newest_version=max((v for _, v in t.policies), default=0),
                first_seen=t.first_seen,
                last_seen=t.last_seen,
                stats=t.stats,
            )
            for incarnation, t in self.searchers.items()
        ]

    def length_row(self, *, epoch: int, step: int, now: float) -> LengthRow:
        """History row of the response-length histograms."""
        return LengthRow(
            epoch=epoch, step=step, time=now, generated=self.generated_lengths, trained=self.trained_lengths
        )

    def alive(self, now: float, within_seconds: float = 60.0) -> int:
        """Searcher processes heard of lately."""
        return sum(now - t.last_seen <= within_seconds for t in self.searchers.values())

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
                    "tokens": t.tokens,
                    "policies": sorted(t.policies),
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
            setattr(counters, name, state[name])
        counters.generated_lengths.update({int(k): int(v) for k, v in state["generated_lengths"]})
        counters.trained_lengths.update({int(k): int(v) for k, v in state["trained_lengths"]})
        counters.fresh_rewards.extend(state["fresh_rewards"])
        for incarnation, tally in state["searchers"].items():
            policies = {(int(e), int(v)) for e, v in tally["policies"]}
            counters.searchers[incarnation] = SearcherTally(**{**tally, "policies": policies})
        return counters
