"""Splits the groups of a batch into micro-batches of whole groups by token budget, and deals them to ranks. Pure.

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


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes over one rank's micro-batches. Collectives match only if all ranks run as many of each kind."""

    scoring: int
    """Without gradients: the first of the two passes over oversized groups."""
    training: int

    @classmethod
    def most(cls, shares: Sequence[Sequence[MicroBatch]]) -> "Passes":
        """Of the ranks that run the most of each kind; `shares`: micro-batches by rank."""
        scoring = [sum(len(m.chunks) for m in share) for share in shares]
        whole = [sum(not m.oversized for m in share) for share in shares]
        return cls(max(scoring), max(s + w for s, w in zip(scoring, whole, strict=True)))


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Numbers of items by rank: the largest first, each to the rank with the least so far. In order within a rank."""
    loads, hands = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        hands[rank].append(item)
        loads[rank] += costs[item]
    return [sorted(hand) for hand in hands]


def split_groups(groups: Sequence[GroupTokens], budget_tokens: int) -> list[MicroBatch]:
    """Put each group, largest first, into the first micro-batch with room for it. Oversized ones come first.

    The largest come first because their memory is the most: what follows fits into what they have left.
    Raises: ValueError if the budget is below 1.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens must be >= 1, got {budget_tokens}")
    order = sorted(range(len(groups)), key=lambda g: (-groups[g].total, g))
    large = [(g, split_rows(groups[g], budget_tokens)) for g in order if groups[g].total > budget_tokens]
    oversized = [MicroBatch((g,), chunks) for g, chunks in large if len(chunks) > 1]
    single = [MicroBatch((g,)) for g, chunks in large if len(chunks) == 1]  # one row: nothing to split
    bins: list[list[int]] = []
    room: list[int] = []
    for g in order[len(large) :]:
        need = groups[g].total
        fitting = next((i for i, free in enumerate(room) if free >= need), None)
        if fitting is None:
            bins.append([g])
            room.append(budget_tokens - need)
        else:
            bins[fitting].append(g)
            room[fitting] -= need
    return oversized + single + [MicroBatch(tuple(members)) for members in bins]


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
