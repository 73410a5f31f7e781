"""Builds the buffer's input from short literals, for the tests of this folder."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.contracts.records import ShardId
from tba.trainer.buffer import NewRows


@dataclass(frozen=True)
class R:
    """One response; reward None = failed."""

    tokens: Sequence[int]
    reward: float | None = 0.0
    version: int = 0


@dataclass(frozen=True)
class V:
    """Rows of one visit that lie in one shard; `size` counts those of other shards too (None: all are here)."""

    visit: int
    prompt: int
    rows: Sequence[R]
    size: int | None = None


def ragged(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    flat = np.array([token for sequence in sequences for token in sequence], "i4")
    return flat, np.cumsum([0, *map(len, sequences)], dtype="i8")


def prompt_of(prompt: int) -> list[int]:
    return [1000 + prompt] * (prompt % 3 + 1)


def new_rows(seq: int, *visits: V, incarnation: str = "a" * 32) -> NewRows:
    rows = [(v, r) for v in visits for r in v.rows]
    response_tokens, response_offsets = ragged([r.tokens for _, r in rows])
    prompt_tokens, prompt_offsets = ragged([prompt_of(v.prompt) for v, _ in rows])
    return NewRows(
        shard=ShardId(incarnation, seq),
        prompt_ids=np.array([v.prompt for v, _ in rows], "i8"),
        visits=np.array([v.visit for v, _ in rows], "i8"),
        visit_sizes=np.array([len(v.rows) if v.size is None else v.size for v, _ in rows], "i4"),
        outcomes=np.array([r.reward is None for _, r in rows], "u1"),
        rewards=np.array([np.nan if r.reward is None else r.reward for _, r in rows], "f4"),
        finish_stop=np.array([len(r.tokens) % 2 == 0 for _, r in rows], bool),
        effective_versions=np.array([r.version for _, r in rows], "i8"),
        response_tokens=response_tokens,
        response_offsets=response_offsets,
        prompt_tokens=prompt_tokens,
        prompt_offsets=prompt_offsets,
    )
