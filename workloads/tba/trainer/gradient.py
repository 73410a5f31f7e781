"""The gradient of one batch: log-probabilities of its groups, their objective, backward; nothing waits for a GPU.

```
plan ─► reference log-probs (cached, or scored here) ─► micro-batches of whole groups ─► objective ─► backward
                                                              results stay on the device until `collect`
```
P prompts (groups) a batch, K responses a group, G groups a micro-batch. With several ranks each runs the micro-batches
of its own groups; `plan`, (P, K) inputs and the division by P are those of the whole batch, so that gradients and
results add up over ranks. A rank with fewer forward passes than another runs dummies, for collectives to match.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tba.contracts.config import Objective
from tba.objectives.trajectory_balance import Loss, ratio_weights
from tba.scoring import to_device
from tba.trainer.batch import MicroBatch, Passes
from tba.trainer.batchrows import Groups, RowSource
from tba.trainer.collate import Collator, Work
from tba.trainer.ranks import Ranks
from tba.trainer.scoring_policy import ScoringPolicy
from tba.trainer.stopwatch import Stopwatch

ObjectiveFn = Callable[..., Loss]


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """What a batch gave, on the host; (P, K) float32."""

    logprobs: np.ndarray
    reference: np.ndarray
    weights: np.ndarray  # multiplicity x ratio weight; 0 = empty slot
    log_z: np.ndarray  # (P,)
    loss: float
    trained_tokens: int
    scored_tokens: int


class BatchGradient:
    """Adds the gradient of one batch's loss to the policy's master weights."""

    def __init__(
        self,
        policy: ScoringPolicy,
        buffer: RowSource,
        collator: Collator,
        plan: Groups,
        *,
        objective: Objective,
        loss: ObjectiveFn,
        beta: float,
        stopwatch: Stopwatch,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._rank, self._num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._policy = policy
        self._buffer = buffer
        self._collator = collator
        self._plan = plan
        self._loss_of = loss
        self._beta = beta
        self._stopwatch = stopwatch
        self._scale = objective.loss_scale.lower()
        self._alpha = float(objective.parameters.get("ratioAlpha", 0.0))
        self._clip = float(objective.parameters.get("ratioClip", 1.0))
        self._shift = float(objective.parameters.get("baselineShift", 0.0))
        used = plan.weights > 0
        self._used = used
        self.rewards = np.where(used, buffer.rewards(plan.rows), 0.0).astype(np.float32)  # (P, K)
        self._mu = np.where(used, buffer.mu_logprobs(plan.rows), np.nan).astype(np.float32)
        device = policy.device
        self._rewards, self._weights, self._old = (
            to_device(a, device) for a in (self.rewards, plan.weights.astype(np.float32), self._mu)
        )
        self._reference = torch.zeros(0, device=device)
        self._logprobs = torch.zeros(plan.rows.shape, device=device)  # (P, K)
        self._used_weights = torch.zeros(plan.rows.shape, device=device)
        self._log_z = torch.zeros(len(plan.rows), device=device)  # (P,)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._missing = np.zeros(0, np.int64)
        self._scored = torch.zeros(0, device=device)  # of the missing rows
        self._trained_tokens = self._scored_tokens = 0

    def run(self, budget_tokens: int) -> None:
        """Score what the reference has not scored yet, then forward and backward of every group."""
        self.score_reference(budget_tokens)
        self.backward(self._collator.micro_batches(self._plan, budget_tokens, self._num_ranks))
        with self._stopwatch("forward_backward"):
            self._sum_whole_gradients()

    def score_reference(self, budget_tokens: int) -> None:
        """Reference log-probabilities of all rows: cached ones, and new ones by large passes without gradients."""
        rows, device = np.unique(self._plan.rows[self._used]), self._policy.device
        self._missing = rows[np.isnan(self._buffer.ref_logprobs(rows))]
        known = np.where(self._used, self._buffer.ref_logprobs(self._plan.rows), 0.0).astype(np.float32)
        self._reference = to_device(np.nan_to_num(known, nan=0.0), device)
        if not len(self._missing):
            return
        self._scored = torch.zeros(len(self._missing), device=device)
        shares = self._collator.reference_chunks(self._missing, budget_tokens, self._num_ranks)
        with ExitStack() as stack:
            with self._stopwatch("reference"):
                stack.enter_context(self._policy.reference_present())
            self._score_chunks(shares[self._rank])
            with self._stopwatch("reference"):
                for _ in range(max(map(len, shares)) - len(shares[self._rank])):
                    self._policy.reference_logprobs(self._collator.dummy())
        self._sum(self._scored)
        slots = np.flatnonzero(np.isnan(known).ravel())
        taken = np.searchsorted(self._missing, self._plan.rows.ravel()[slots])
        self._reference.view(-1).index_copy_(0, to_device(slots, device), self._scored[to_device(taken, device)])

    def backward(self, shares: Sequence[Sequence[MicroBatch]]) -> None:
        """Forward and backward of this rank's groups; `shares`: micro-batches by rank, oversized groups first."""
        own, passes = shares[self._rank], Passes.most(shares)
        ahead = self._collator.work_ahead(self._plan, own)
        waiting: list[tuple[Work, Tensor]] = []
        for _ in filter(lambda m: m.oversized, own):
            with self._stopwatch("collate"):
                work = next(ahead)
            with self._stopwatch("forward_backward"):
                waiting.append((work, self._first_pass(work)))
            passes = Passes(passes.scoring - len(work.pieces), passes.training)
        with self._stopwatch("forward_backward"):
            for _ in range(passes.scoring):
                self._policy.policy_logprobs(self._collator.dummy(), grad=False)
            for work, share in waiting:
                self._second_pass(work, share)
                passes = Passes(0, passes.training - len(work.pieces))
        for _ in filter(lambda m: not m.oversized, own):
            with self._stopwatch("collate"):
                work = next(ahead)
            with self._stopwatch("forward_backward"):
                self._whole(work)
            passes = Passes(0, passes.training - 1)
        with self._stopwatch("forward_backward"):
            for _ in range(passes.training):
                (self._policy.policy_logprobs(self._collator.dummy(), grad=True) * 0.0).sum().backward()

    def collect(self) -> Callable[[], Gathered]:
        """Start to copy the results to the host; the function returned waits for them and caches what rows keep."""
        counts = to_device(np.array([self._trained_tokens, self._scored_tokens], np.float32), self._policy.device)
        parts = [self._logprobs, self._used_weights, self._log_z, self._loss.float(), counts]
        summed = torch.cat([part.detach().reshape(-1) for part in parts])
        self._sum(summed)
        flat = torch.cat([summed, self._reference.reshape(-1), self._scored]).to("cpu", non_blocking=True)
        copied = None
        if self._policy.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()

        def wait() -> Gathered:
            if copied is not None:
                copied.synchronize()
            return self._unpack(flat.numpy())

        return wait

    # -- private

    def _sum(self, values: Tensor) -> None:
        """Over ranks, each of which has 0 where another computes."""
        if self._ranks is not None:
            self._ranks.sum(values)

    @torch.no_grad()
    def _sum_whole_gradients(self) -> None:
        """Of parameters that every rank holds whole; those of shards were summed on the way."""
        if self._ranks is None:
            return
        whole = [p for p in self._policy.model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole]
        if not grads:
            return
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        self._sum(flat)
        for parameter, summed in zip(whole, flat.split([g.numel() for g in grads]), strict=True):
            parameter.grad = summed.view_as(parameter)

    def _score_chunks(self, chunks: Sequence[np.ndarray]) -> None:
        ahead = self._collator.rows_ahead(chunks)
        for chunk in chunks:
            with self._stopwatch("collate"):
                packed = next(ahead)
            with self._stopwatch("reference"):
                places = to_device(np.searchsorted(self._missing, chunk), self._policy.device)
                self._scored.index_copy_(0, places, self._policy.reference_logprobs(packed))
            self._scored_tokens += packed.num_tokens

    def _whole(self, work: Work) -> None:
        (piece,) = work.pieces
        flat = self._policy.policy_logprobs(piece.rows, grad=True)  # (B,)
        self._objective_of(work, self._table(work).index_put((piece.slots,), flat)).backward()
        self._trained_tokens += work.num_tokens

    def _first_pass(self, work: Work) -> Tensor:
        """Of an oversized group (system.md §5): its loss by its log-probabilities, without the model's gradients."""
        table = self._table(work)
        for piece in work.pieces:
            table[piece.slots] = self._policy.policy_logprobs(piece.rows, grad=False)
        table.requires_grad_()
        self._objective_of(work, table).backward()
        assert table.grad is not None
        return table.grad

    def _second_pass(self, work: Work, grad: Tensor) -> None:
        """The backward pass in any split."""
        for piece in work.pieces:
            share = grad[piece.slots]
            (share * self._policy.policy_logprobs(piece.rows, grad=True)).sum().backward()
        self._trained_tokens += work.num_tokens

    def _table(self, work: Work) -> Tensor:
        """Zeros for the (G, K) log-probabilities of a micro-batch, flat."""
        return torch.zeros(len(work.groups) * self._plan.rows.shape[1], device=self._policy.device)

    def _objective_of(self, work: Work, table: Tensor) -> Tensor:
        """This micro-batch's share of the batch's loss; its results go to their groups."""
        logprobs = table.view(len(work.groups), -1)  # (G, K)
        weights = self._weigh(work.groups, logprobs)
        result = self._loss_of(
            logprobs,
            self._reference[work.groups],
            self._rewards[work.groups],
            beta=self._beta,
            weights=weights,
            baseline_shift=self._shift,
            scale=self._scale,
        )
        loss = result.loss * (len(work.groups) / len(self._plan.rows))
        self._loss += loss.detach()
        self._logprobs.index_copy_(0, work.groups, logprobs.detach())
        self._used_weights.index_copy_(0, work.groups, weights)
        self._log_z.index_copy_(0, work.groups, result.log_z)
        return loss

    def _weigh(self, groups: Tensor, logprobs: Tensor) -> Tensor:
        """Multiplicities times ratio weights. Where no sampler told μ, the first use defines it: ratio 1."""
        weights, old = self._weights[groups], self._old[groups]
        if self._alpha == 0.0:
            return weights
        ratio = ratio_weights(logprobs, old, alpha=self._alpha, clip=self._clip)
        return weights * torch.where(old.isnan(), min(1.0, self._clip), ratio)

    def _unpack(self, flat: np.ndarray) -> Gathered:
        shape = self._plan.rows.shape
        size = shape[0] * shape[1]
        ends = np.cumsum([size, size, shape[0], 1, 2, size])
        logprobs, weights, log_z, (loss,), counts, reference, scored = np.split(flat, ends)
        logprobs, weights, reference = (part.reshape(shape).copy() for part in (logprobs, weights, reference))
        if len(scored):
            self._buffer.set_ref_logprobs(self._missing, scored)
        if self._alpha != 0.0:
            first = self._used & np.isnan(self._mu)
            self._buffer.set_mu_logprobs(self._plan.rows[first], logprobs[first])
        return Gathered(logprobs, reference, weights, log_z.copy(), float(loss), int(counts[0]), int(counts[1]))
