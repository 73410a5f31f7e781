"""Rows of a batch as tensors on the device, made ahead of the computation that takes them.

Token rows are laid out by numpy and copied to a GPU from pinned memory; on a GPU both are done in a thread while the
micro-batch before is computed. Nothing here waits for the device.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tba.scoring import Rows, to_device
from tba.trainer.batch import GroupTokens, MicroBatch, deal, split_groups
from tba.trainer.batchrows import Groups, RowSource
from tba.trainer.scoring_policy import ScoringPolicy

T = TypeVar("T")
REFERENCE_BUDGET = 4
"""Times the token budget: without gradients nothing is kept for a backward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of one forward pass and the slots of their groups that they fill."""

    rows: Rows
    slots: Tensor  # (B,) int64: place in the micro-batch's (G, K), flattened


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A micro-batch on the device: its G groups, in one piece or, if they are one oversized group, in several."""

    groups: Tensor  # (G,) int64
    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        """That the model computes."""
        return sum(piece.rows.num_tokens for piece in self.pieces)


class Collator:
    """Lays out rows for one policy."""

    def __init__(self, buffer: RowSource, policy: ScoringPolicy) -> None:
        self._buffer = buffer
        self._policy = policy
        self._thread: ThreadPoolExecutor | None = None
        if policy.device.type == "cuda":
            # The current device is a thread's own: without this one it would open a context on the first GPU.
            self._thread = ThreadPoolExecutor(
                1, thread_name_prefix="collate", initializer=torch.cuda.set_device, initargs=(policy.device,)
            )

    def rows(self, ids: np.ndarray) -> Rows:
        """Buffer rows, in order."""
        prompts = [self._buffer.prompt_tokens(int(p)) for p in self._buffer.prompt_ids(ids)]
        return self._policy.pack(prompts, [self._buffer.tokens(int(r)) for r in ids])

    def reference_chunks(self, ids: np.ndarray, budget_tokens: int, num_ranks: int = 1) -> list[list[np.ndarray]]:
        """By rank: rows in pieces to score under the reference, those of a prompt together."""
        prompt_ids, inverse = np.unique(self._buffer.prompt_ids(ids), return_inverse=True)
        members = [ids[inverse == i] for i in range(len(prompt_ids))]
        groups = [self._tokens(int(p), rows) for p, rows in zip(prompt_ids, members, strict=True)]
        shares: list[list[np.ndarray]] = []
        for hand in deal([g.total for g in groups], num_ranks):
            chunks: list[np.ndarray] = []
            for micro_batch in split_groups([groups[g] for g in hand], REFERENCE_BUDGET * budget_tokens):
                rows = [members[hand[g]] for g in micro_batch.groups]
                if micro_batch.oversized:
                    chunks += [rows[0][list(chunk)] for chunk in micro_batch.chunks]
                else:
                    chunks.append(np.concatenate(rows))
            shares.append(chunks)
        return shares

    def micro_batches(self, plan: Groups, budget_tokens: int, num_ranks: int = 1) -> list[list[MicroBatch]]:
        """By rank: groups of a plan in micro-batches, oversized groups first; empty slots are left out."""
        used = plan.weights > 0
        groups = [self._tokens(int(p), plan.rows[g][used[g]]) for g, p in enumerate(plan.prompt_ids)]
        shares: list[list[MicroBatch]] = []
        for hand in deal([g.total for g in groups], num_ranks):
            split = split_groups([groups[g] for g in hand], budget_tokens)
            shares.append([MicroBatch(tuple(hand[g] for g in m.groups), m.chunks) for m in split])
        return shares

    def dummy(self) -> Rows:
        """The least to run a pass with, where another rank has rows."""
        return self._policy.pack([np.zeros(1, np.int64)], [np.zeros(2, np.int64)])

    def work(self, plan: Groups, micro_batch: MicroBatch) -> Work:
        """A micro-batch of the plan on the device."""
        groups = np.array(micro_batch.groups, dtype=np.int64)
        index, k = np.nonzero(plan.weights[groups] > 0)
        rows, slots = plan.rows[groups[index], k], index * plan.rows.shape[1] + k
        chunks = [np.array(chunk) for chunk in micro_batch.chunks] or [np.arange(len(rows))]
        pieces = tuple(Piece(self.rows(rows[c]), to_device(slots[c], self._policy.device)) for c in chunks)
        return Work(to_device(groups, self._policy.device), pieces)

    def ahead(self, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Results of jobs in order; on a GPU each is done, in a thread, while its predecessor's is used."""
        if self._thread is None:
            for job in jobs:
                yield job()
            return
        waiting: deque[Future[T]] = deque()
        for job in jobs:
            waiting.append(self._thread.submit(job))
            if len(waiting) > 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def rows_ahead(self, chunks: Iterable[np.ndarray]) -> Iterator[Rows]:
        """`rows` of each, ahead."""
        return self.ahead(partial(self.rows, chunk) for chunk in chunks)

    def work_ahead(self, plan: Groups, micro_batches: Iterable[MicroBatch]) -> Iterator[Work]:
        """`work` of each, ahead."""
        return self.ahead(partial(self.work, plan, micro_batch) for micro_batch in micro_batches)

    def _tokens(self, prompt_id: int, rows: np.ndarray) -> GroupTokens:
        responses = tuple(self._buffer.num_tokens(rows).tolist())
        return GroupTokens(len(self._buffer.prompt_tokens(prompt_id)), responses, self._policy.scorer.shares_prompts)
