"""What goes into the replay buffer: a shard's rows as columns, and their checks. Pure."""

from dataclasses import dataclass

import numpy as np

from tba.contracts.errors import CorruptObject
from tba.contracts.records import ShardId

SCORED = 0  # of `NewRows.outcomes`; anything else carries no reward
_INT32 = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """Rows of one shard, columnar, in shard order; n rows."""

    shard: ShardId
    prompt_ids: np.ndarray  # (n,) int
    visits: np.ndarray  # (n,) int: visit number within the shard's incarnation
    visit_sizes: np.ndarray  # (n,) int: rows of that visit over all its shards
    outcomes: np.ndarray  # (n,) uint8: SCORED, or 1 failed, 2 timed out
    rewards: np.ndarray  # (n,) float32: finite where scored
    finish_stop: np.ndarray  # (n,) bool
    effective_versions: np.ndarray  # (n,) int: of the oldest span, after rollbacks (system.md §4)
    response_tokens: np.ndarray  # flat int32
    response_offsets: np.ndarray  # (n + 1,) int64
    prompt_tokens: np.ndarray  # flat int32
    prompt_offsets: np.ndarray  # (n + 1,) int64
    ref_logprobs: np.ndarray | None = None  # (n,) float32 of the buffer's current reference, NaN where unknown
    mu_logprobs: np.ndarray | None = None  # (n,) float32 of whole responses under their samplers, NaN where not told
    row_numbers: np.ndarray | None = None  # (n,) int: rows in the shard; None: 0..n-1

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def numbers(self) -> np.ndarray:
        """Row numbers in the shard, (n,)."""
        return np.arange(len(self)) if self.row_numbers is None else self.row_numbers

    def visit_groups(self) -> list[np.ndarray]:
        """Row indices of each visit, visits in the order in which their last row stands."""
        order = np.argsort(self.visits, kind="stable")
        bounds = np.flatnonzero(np.diff(self.visits[order])) + 1
        return sorted(np.split(order, bounds), key=lambda index: int(index[-1])) if len(order) else []


def check(rows: NewRows) -> None:
    """Refuse rows that contradict themselves. Raises: CorruptObject."""
    n = len(rows)
    columns = (rows.visits, rows.visit_sizes, rows.outcomes, rows.rewards, rows.finish_stop, rows.effective_versions)
    optional = tuple(c for c in (rows.ref_logprobs, rows.mu_logprobs, rows.row_numbers) if c is not None)
    _require(rows, all(len(c) == n for c in columns + optional), "columns of one length")
    for tokens, offsets in (
        (rows.response_tokens, rows.response_offsets),
        (rows.prompt_tokens, rows.prompt_offsets),
    ):
        good = (
            len(offsets) == n + 1 and offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) >= 0).all()
        )
        _require(rows, bool(good), "offsets that cover their tokens")
    if n == 0:
        return
    _require(rows, bool((rows.visit_sizes >= 1).all()), "visit sizes >= 1")
    _require(rows, bool((rows.prompt_ids >= 0).all()), "prompt ids >= 0")
    versions = rows.effective_versions
    _require(rows, bool(((versions >= 0) & (versions < _INT32)).all()), "effective versions in 0..2^31-1")
    _require(rows, bool(np.isfinite(rows.rewards[rows.outcomes == SCORED]).all()), "finite rewards of scored rows")
    for index in rows.visit_groups():
        same = (rows.prompt_ids[index] == rows.prompt_ids[index[0]]) & (
            rows.visit_sizes[index] == rows.visit_sizes[index[0]]
        )
        _require(rows, bool(same.all()), f"one prompt and one size in visit {rows.visits[index[0]]}")
        fits = len(index) <= rows.visit_sizes[index[0]]
        _require(rows, bool(fits), f"at most visitSize rows in visit {rows.visits[index[0]]}")


def _require(rows: NewRows, condition: bool, what: str) -> None:
    if not condition:
        raise CorruptObject(f"shard {rows.shard} must have {what}: quarantine it and check its searcher")
