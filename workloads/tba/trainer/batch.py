"""Splits the groups of a batch into micro-batches of whole groups by token budget. Pure.

Tokens of a group are those the model computes: its prompt once and each response, or a prompt a row for models whose
rows cannot share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """Lengths of one group's distinct rows."""

    prompt: int
    responses: tuple[int, ...]
    shared: bool = True
    """The prompt is computed once for all rows of a forward pass."""

    def of(self, rows: Sequence[int]) -> int:
        """Tokens that a forward pass over these rows computes."""
        return self.prompt * (min(1, len(rows)) if self.shared else len(rows)) + sum(self.responses[i] for i in rows)

    @property
    def total(self) -> int:
        """Of all rows together."""
        return self.of(range(len(self.responses)))


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


def split_groups(groups: Sequence[GroupTokens], budget_tokens: int) -> list[MicroBatch]:
    """Put each group, largest first, into the first micro-batch with room for it.

    The largest come first because their memory is the most: what follows fits into what they have left.
    Raises: ValueError if the budget is below 1.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens must be >= 1, got {budget_tokens}")
    order = sorted(range(len(groups)), key=lambda g: (-groups[g].total, g))
    oversized = [
        MicroBatch((g,), split_rows(groups[g], budget_tokens)) for g in order if groups[g].total > budget_tokens
    ]
    bins: list[list[int]] = []
    room: list[int] = []
    for g in order[len(oversized) :]:
        need = groups[g].total
        fitting = next((i for i, free in enumerate(room) if free >= need), None)
        if fitting is None:
            bins.append([g])
            room.append(budget_tokens - need)
        else:
            bins[fitting].append(g)
            room[fitting] -= need
    return oversized + [MicroBatch(tuple(members)) for members in bins]


def split_rows(group: GroupTokens, budget_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Row numbers, longest first, in pieces within the budget; a row that alone exceeds it goes alone."""
    order = sorted(range(len(group.responses)), key=lambda i: (-group.responses[i], i))
    pieces: list[tuple[int, ...]] = []
    piece: list[int] = []
    for row in order:
        if piece and group.of([*piece, row]) > budget_tokens:
            pieces.append(tuple(piece))
            piece = []
        piece.append(row)
    if piece:
        pieces.append(tuple(piece))
    return tuple(pieces)
