"""The learning core: rows in, optimizer steps out. No store, no threads: a function of its inputs and their order.

```
ShardBatch ─► ingest ─► ReplayBuffer ─► Sampler.sample ─► (P, K) plan
                                                             │ reference log-probs, cached per row
              Optimizer ◄─ gradients ◄─ objective ◄─ policy log-probs, micro-batches of whole groups
```
The same object serves a live run, a resumed one and an offline replay; that is why their weights can be compared.
P prompts (groups) a batch, K responses a group.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.contracts.config import LiveConfig, RunConfig
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import ShardKey
from tba.contracts.records import Lineage, PolicyId, ShardId
from tba.objectives import lookup
from tba.objectives.schedules import beta_at
from tba.objectives.trajectory_balance import Loss, ratio_weights
from tba.protocol.bookkeeping import Bookkeeping
from tba.protocol.lineage import effective_version
from tba.scoring import Rows, pad_rows
from tba.shards import ShardBatch
from tba.trainer.batch import MicroBatch, split_groups, split_rows
from tba.trainer.buffer import AddReport, Fetch, NewRows, ReplayBuffer
from tba.trainer.checkpoint import TrainerState
from tba.trainer.counters import Counters
from tba.trainer.model import Policy
from tba.trainer.optim import Optimizer, Update
from tba.trainer.sampling import BatchPlan, Sampler, SamplingSettings, Waiting

_SAME_REWARD = 1e-6
"""Rewards that differ by less are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one optimizer step did; (P, K) tensors are on the host."""

    plan: BatchPlan
    loss: float
    beta: float
    ell: np.ndarray  # (P, K) summed log-ratio to the reference
    rewards: np.ndarray  # (P, K)
    weights: np.ndarray  # (P, K) multiplicity x ratio weight; 0 = empty slot
    log_z: np.ndarray  # (P,)
    update: Update
    trained_tokens: int
    score_seconds: float
    train_seconds: float
    reference_changed: bool


class Learner:
    """Policy, optimizer, buffer and sampler of one run."""

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self.policy = policy
        self.config = config
        self.step = 0
        self.counters = Counters()
        self.shard_paths: dict[ShardId, str] = {}
        """Key of every shard that the buffer holds rows of."""
        self.optimizer = Optimizer(dict(policy.model.named_parameters()), config.objective)
        self.buffer = ReplayBuffer(
            capacity_per_prompt=config.buffer.capacity_per_prompt,
            deduplicate=config.buffer.deduplicate,
            max_trajectories=config.buffer.max_trajectories,
        )
        self.buffer.set_reference(_reference_key(policy.reference_policy))
        self.sampler = Sampler(config.objective.seed)
        self._objective = lookup(config.objective.type)

    # -- rows in

    def ingest_shard(self, path: str, batch: ShardBatch, book: Bookkeeping, *, now: float = 0.0) -> AddReport:
        """Add a shard's rows. Raises: CorruptObject, before anything changed, if they contradict themselves or claim
        a policy that cannot exist."""
        for policy in _policies(batch):
            if not book.knows(policy):
                raise CorruptObject(f"claims policy {policy}, but this run is at epoch {book.epoch}, step {book.step}")
        report = self.buffer.add(new_rows(batch, book.lineage))
        self.shard_paths[batch.header.id] = path
        self.counters.ingested(batch, now)
        self.counters.duplicate_rows += report.duplicates
        self.counters.failed_rows += report.failed
        return report

    # -- steps out

    def waiting_for(self, live: LiveConfig) -> str | None:
        """Why no step can be taken yet, in words; None if one can. Draws no random number."""
        state = self.sampler.readiness(self.buffer, self.step, self._settings(live))
        return state.reason if isinstance(state, Waiting) else None

    def train_step(self, live: LiveConfig, epoch: int) -> StepResult:
        """Sample a batch, score it and take optimizer step `self.step + 1`."""
        budget = live.trainer.micro_batch_tokens
        plan = self.sampler.sample(self.buffer, self.step, self._settings(live))
        started = time.perf_counter()
        reference = self._reference_logprobs(plan, budget)
        scored = time.perf_counter()
        beta = beta_at(self.step + 1, self.config.objective)
        self.optimizer.zero_grad()
        pass_ = _Pass(self, plan, reference, beta)
        for micro_batch in split_groups(pass_.row_lengths(), budget):
            pass_.run(micro_batch)
        update = self.optimizer.apply(self.step + 1)
        self.step += 1
        changed = self.policy.after_step(self.step, epoch)
        if changed:
            self.buffer.set_reference(_reference_key(self.policy.reference_policy))
        tokens = self._count(plan)
        self.counters.signal_groups += _num_differing(pass_.rewards, plan.weights > 0)
        return StepResult(
            plan=plan,
            loss=pass_.loss,
            beta=beta,
            ell=pass_.logprobs - reference,
            rewards=pass_.rewards,
            weights=pass_.weights,
            log_z=pass_.log_z,
            update=update,
            trained_tokens=tokens,
            score_seconds=scored - started,
            train_seconds=time.perf_counter() - scored,
            reference_changed=changed,
        )

    # -- checkpoints

    def state(self) -> TrainerState:
        """Detached copy of everything; cheap enough to take between two steps."""
        moments, norms = self.optimizer.state()
        tensors: dict[str, dict[str, Tensor]] = {
            "master": self.policy.master_state(),
            "optimizer": moments,
            "buffer": {n: torch.from_numpy(np.array(a, copy=True)) for n, a in self.buffer.state().items()},
        }
        reference = self.policy.reference_state()
        if reference is not None:
            tensors["reference"] = reference
        facts = {
            "grad_norms": norms,
            "sampler": self.sampler.state(),
            "counters": self.counters.state(),
            "reference_policy": list(self.policy.reference_policy),
            "shard_paths": self._held_paths(),
        }
        return TrainerState(tensors, facts)

    def restore(self, state: TrainerState, step: int, fetch: Fetch) -> dict[ShardId, int]:
        """Undo `state`; `fetch` reads the buffer's rows again from their shards.

        Returns, by shard, how many rows the buffer has lost because `fetch` did not give them.
        """
        facts: dict[str, Any] = dict(state.facts)
        self.step = step
        self.policy.restore(state.tensors["master"], state.tensors.get("reference"))
        self.policy.reference_policy = PolicyId(*facts["reference_policy"])
        self.optimizer.restore(state.tensors["optimizer"], facts["grad_norms"])
        lost = self.buffer.restore({n: t.numpy() for n, t in state.tensors["buffer"].items()}, fetch)
        self.sampler.restore(facts["sampler"])
        self.counters = Counters.restored(facts["counters"])
        self.shard_paths = {
            ShardId(inc, int(seq)): str(path) for inc, items in facts["shard_paths"].items() for seq, path in items
        }
        return lost

    # -- private

    def _held_paths(self) -> dict[str, list[list[Any]]]:
        """incarnation -> [[seq, key], ...] of the shards that the buffer holds rows of; forgets the others."""
        held = self.buffer.shards()
        self.shard_paths = {shard: path for shard, path in self.shard_paths.items() if shard in held}
        result: dict[str, list[list[Any]]] = {}
        for shard, path in self.shard_paths.items():
            result.setdefault(shard.incarnation, []).append([shard.seq, path])
        return result

    def _settings(self, live: LiveConfig) -> SamplingSettings:
        return SamplingSettings.from_config(self.config, live)

    def _reference_logprobs(self, plan: BatchPlan, budget: int) -> np.ndarray:
        """(P, K) float32; scored rows are cached until the reference changes (never under EMA)."""
        if not self.policy.caches_reference:
            self.buffer.set_reference(f"{self.step}")
        rows = np.unique(plan.rows[plan.weights > 0])
        missing = rows[np.isnan(self.buffer.ref_logprobs(rows))]
        lengths = [len(self.buffer.prompt_tokens(int(p))) for p in self.buffer.prompt_ids(missing)]
        lengths = [a + int(b) for a, b in zip(lengths, self.buffer.num_tokens(missing), strict=True)]
        for chunk in split_rows(lengths, budget):
            ids = missing[list(chunk)]
            values = self.policy.reference_logprobs(self.padded(ids)).cpu().numpy()
            self.buffer.set_ref_logprobs(ids, values)
        return np.where(plan.weights > 0, self.buffer.ref_logprobs(plan.rows), 0.0).astype(np.float32)

    def searcher_of(self, row: int) -> str:
        """Name of the searcher that made a row."""
        made = self.buffer.trajectory_ids(np.array([row]))[0]
        return ShardKey.parse(self.shard_paths[ShardId(made.incarnation, made.seq)]).searcher

    def padded(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """Buffer rows as padded token tensors on the policy's device."""
        ids = np.asarray(rows, dtype=np.int64)
        prompts = [self.buffer.prompt_tokens(int(p)) for p in self.buffer.prompt_ids(ids)]
        return pad_rows(prompts, [self.buffer.tokens(int(r)) for r in ids], self.policy.device)

    def _count(self, plan: BatchPlan) -> int:
        drawn = self.buffer.num_tokens(plan.rows).ravel()
        self.counters.trained_rows += drawn.size
        self.counters.trained_groups += len(plan.rows)
        self.counters.trained_tokens += int(drawn.sum())
        self.counters.trained_lengths.update(drawn.tolist())
        return int(drawn.sum())


class _Pass:
    """Forward and backward over the groups of one batch; gradients accumulate, results gather by group."""

    def __init__(self, learner: Learner, plan: BatchPlan, reference: np.ndarray, beta: float) -> None:
        self._learner = learner
        self._plan = plan
        self._reference = reference
        self._beta = beta
        self._scale = learner.config.objective.loss_scale.lower()
        self._parameters = learner.config.objective.parameters
        shape = plan.rows.shape
        used = plan.weights > 0
        self.rewards = np.where(used, learner.buffer.rewards(plan.rows), 0.0).astype(np.float32)  # (P, K)
        self.weights = plan.weights.astype(np.float32).copy()  # (P, K)
        self.logprobs = np.zeros(shape, dtype=np.float32)  # (P, K)
        self.log_z = np.zeros(shape[0], dtype=np.float32)  # (P,)
        self.loss = 0.0

    def row_lengths(self) -> list[list[int]]:
        """Per group, prompt+response tokens of each distinct row."""
        buffer, plan = self._learner.buffer, self._plan
        tokens = buffer.num_tokens(plan.rows)
        prompts = [len(buffer.prompt_tokens(int(p))) for p in plan.prompt_ids]
        return [
            [prompts[g] + int(tokens[g, k]) for k in np.flatnonzero(plan.weights[g] > 0)] for g in range(len(prompts))
        ]

    def run(self, micro_batch: MicroBatch) -> None:
        """Add this micro-batch's share of the gradient of the batch's loss."""
        if micro_batch.oversized:
            self._run_in_pieces(micro_batch.groups[0], micro_batch.chunks)
            return
        groups = list(micro_batch.groups)
        slots = [(g, int(k)) for g in groups for k in np.flatnonzero(self._plan.weights[g] > 0)]
        rows = self._learner.padded([self._plan.rows[s] for s in slots])
        flat = self._learner.policy.policy_logprobs(rows, grad=True)  # (n,)
        position = {g: i for i, g in enumerate(groups)}
        index = torch.tensor([[position[g], k] for g, k in slots], device=flat.device).T  # (2, n)
        shape = (len(groups), self._plan.rows.shape[1])
        logprobs = torch.zeros(shape, device=flat.device).index_put((index[0], index[1]), flat)  # (G, K)
        self._objective_of(groups, logprobs).loss.mul(len(groups) / len(self._plan.rows)).backward()

    def _run_in_pieces(self, group: int, chunks: tuple[tuple[int, ...], ...]) -> None:
        """Two passes: log-probabilities without gradients, then the backward pass in any split (system.md §5)."""
        policy = self._learner.policy
        slots = np.flatnonzero(self._plan.weights[group] > 0)
        rows = [self._learner.padded(self._plan.rows[group, slots[list(chunk)]]) for chunk in chunks]
        logprobs = torch.zeros((1, self._plan.rows.shape[1]), device=policy.device)  # (1, K)
        for chunk, padded in zip(chunks, rows, strict=True):
            logprobs[0, torch.as_tensor(slots[list(chunk)])] = policy.policy_logprobs(padded, grad=False)
        logprobs.requires_grad_()
        self._objective_of([group], logprobs).loss.div(len(self._plan.rows)).backward()
        assert logprobs.grad is not None
        for chunk, padded in zip(chunks, rows, strict=True):
            share = logprobs.grad[0, torch.as_tensor(slots[list(chunk)])]
            (share * policy.policy_logprobs(padded, grad=True)).sum().backward()

    def _objective_of(self, groups: list[int], logprobs: Tensor) -> Loss:
        device = logprobs.device
        self.logprobs[groups] = logprobs.detach().cpu().numpy()
        self._weigh(groups)
        result: Loss = self._learner._objective(
            logprobs,
            torch.from_numpy(self._reference[groups]).to(device),
            torch.from_numpy(self.rewards[groups]).to(device),
            beta=self._beta,
            weights=torch.from_numpy(self.weights[groups]).to(device),
            scale=self._scale,
        )
        self.loss += float(result.loss.detach()) * len(groups) / len(self._plan.rows)
        self.log_z[groups] = result.log_z.cpu().numpy()
        return result

    def _weigh(self, groups: list[int]) -> None:
        """Multiply multiplicities by ratio weights; a row's first use defines its μ, hence has ratio 1."""
        alpha = float(self._parameters.get("ratioAlpha", 0.0))
        if alpha == 0.0:
            return
        buffer, rows = self._learner.buffer, self._plan.rows[groups]
        used = self._plan.weights[groups] > 0
        first = used & np.isnan(buffer.mu_logprobs(rows))
        buffer.set_mu_logprobs(rows[first], self.logprobs[groups][first])
        ratio = ratio_weights(
            torch.from_numpy(self.logprobs[groups]),
            torch.from_numpy(buffer.mu_logprobs(rows)),
            alpha=alpha,
            clip=float(self._parameters.get("ratioClip", 1.0)),
        ).numpy()
        self.weights[groups] = np.where(used, self._plan.weights[groups] * ratio, 0.0)


def _num_differing(rewards: np.ndarray, used: np.ndarray) -> int:
    """Groups (rows) whose used rewards are not all the same."""
    most, least = np.where(used, rewards, -np.inf).max(1), np.where(used, rewards, np.inf).min(1)  # (P,)
    return int((most - least > _SAME_REWARD).sum())


def new_rows(batch: ShardBatch, lineage: Lineage) -> NewRows:
    """A shard's rows as the buffer takes them: versions resolved against rollbacks."""
    return NewRows(
        shard=batch.header.id,
        prompt_ids=batch.prompt_ids,
        visits=batch.visits,
        visit_sizes=batch.visit_sizes,
        outcomes=batch.outcomes,
        rewards=batch.rewards,
        finish_stop=batch.finish_stop,
        effective_versions=_oldest_versions(batch, lineage),
        response_tokens=batch.response_tokens,
        response_offsets=batch.response_offsets,
        prompt_tokens=batch.prompt_tokens,
        prompt_offsets=batch.prompt_offsets,
    )


def _oldest_versions(batch: ShardBatch, lineage: Lineage) -> np.ndarray:
    """(n,) int64: least effective version over each row's spans; 0 for a failed row without tokens."""
    pairs = np.stack([batch.span_epochs, batch.span_versions], axis=1)  # (spans, 2)
    known, inverse = np.unique(pairs, axis=0, return_inverse=True)
    effective = np.array([effective_version(lineage, PolicyId(int(e), int(v))) for e, v in known], dtype=np.int64)
    per_span = effective[inverse.ravel()] if len(known) else np.zeros(0, dtype=np.int64)
    counts = np.diff(batch.span_offsets)
    result = np.zeros(len(batch), dtype=np.int64)
    filled = counts > 0
    if filled.any():
        result[filled] = np.minimum.reduceat(per_span, batch.span_offsets[:-1][filled])
    return result


def _policies(batch: ShardBatch) -> list[PolicyId]:
    pairs = np.unique(np.stack([batch.span_epochs, batch.span_versions], axis=1), axis=0)
    return [PolicyId(int(e), int(v)) for e, v in pairs]


def _reference_key(policy: PolicyId) -> str:
    return f"{policy.epoch}/{policy.version}"
