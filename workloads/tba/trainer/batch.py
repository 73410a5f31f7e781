"""Splits the groups of a batch into micro-batches of whole groups by token budget. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Groups whose rows go through the model together, or one group too large for that."""

    groups: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...] = ()
    """Of an oversized group: its row numbers in pieces within the budget. Empty for a normal micro-batch."""

    @property
    def oversized(self) -> bool:
        """Whether the two-pass rule applies: log-probabilities first, then the backward pass in pieces."""
        return bool(self.chunks)


def split_groups(row_lengths: Sequence[Sequence[int]], budget_tokens: int) -> list[MicroBatch]:
    """Pack groups, longest first, while rows x longest row stays within `budget_tokens`.

    row_lengths: per group, prompt+response tokens of each distinct row. A row longer than the budget goes alone.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens must be >= 1, got {budget_tokens}")
    order = sorted(range(len(row_lengths)), key=lambda g: (-max(row_lengths[g]), g))
    result: list[MicroBatch] = []
    current: list[int] = []
    num_rows = longest = 0
    for g in order:
        rows, length = len(row_lengths[g]), max(row_lengths[g])
        if rows * length > budget_tokens:
            result.append(MicroBatch((g,), split_rows(row_lengths[g], budget_tokens)))
            continue
        if current and (num_rows + rows) * max(longest, length) > budget_tokens:
            result.append(MicroBatch(tuple(current)))
            current, num_rows, longest = [], 0, 0
        current.append(g)
        num_rows, longest = num_rows + rows, max(longest, length)
    if current:
        result.append(MicroBatch(tuple(current)))
    return result


def split_rows(lengths: Sequence[int], budget_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Row numbers, longest first, in pieces whose rows x longest row stays within the budget (at least one row)."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    pieces: list[tuple[int, ...]] = []
    start = 0
    while start < len(order):
        size = max(1, budget_tokens // max(1, lengths[order[start]]))
        pieces.append(tuple(order[start : start + size]))
        start += size
    return tuple(pieces)
