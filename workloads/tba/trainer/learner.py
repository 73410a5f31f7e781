"""The learning core: rows in, optimizer steps out. No store, no threads: a function of its inputs and their order.

```
ShardBatch ─► ingest ─► ReplayBuffer ─► Sampler.sample ─► (P, K) plan
                                                             │ micro-batches of whole groups (collate)
              Optimizer.apply ◄──────── BatchGradient: reference log-probs, forward, objective, backward
```
The same object serves a live run, a resumed one and an offline replay; that is why their weights can be compared.
With several ranks it is rank 0's: it orders what the others do (`rank`), and computes its own share.
P prompts (groups) a batch, K responses a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.contracts.config import LiveConfig, RunConfig, TrainerSettings
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.keys import ShardKey
from tba.contracts.records import Lineage, PolicyId, ShardId
from tba.log import CONFIG_REFUSED, log
from tba.objectives import lookup
from tba.objectives.schedules import beta_at
from tba.protocol.bookkeeping import Bookkeeping
from tba.protocol.lineage import effective_version
from tba.scoring import Rows
from tba.shards import ShardBatch
from tba.trainer.batchrows import pack_batch
from tba.trainer.buffer import AddReport, Fetch, NewRows, ReplayBuffer
from tba.trainer.checkpoint import TrainerState
from tba.trainer.collate import Collator
from tba.trainer.counters import Counters
from tba.trainer.gradient import BatchGradient
from tba.trainer.optim import Optimizer, Update
from tba.trainer.rank import step_facts
from tba.trainer.ranks import Ranks
from tba.trainer.sampling import BatchPlan, Sampler, SamplingSettings, Waiting
from tba.trainer.scoring_policy import ScoringPolicy
from tba.trainer.stopwatch import Stopwatch

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
    """Computed forward and backward; a prompt counts once for all rows that shared it, the last token of a row never.
    """
    scored_tokens: int
    """The same of the reference's forward pass: rows whose log-probability was not cached."""
    phase_seconds: dict[str, float]
    """collate, reference, forward_backward, optimizer; on a GPU of its own time line (see `stopwatch`)."""
    reference_changed: bool
    row_tokens: int = 0
    """Prompt and response of each distinct row: what rows that share nothing would have cost without padding."""


class Learner:
    """Policy, optimizer, buffer and sampler of one run."""

    def __init__(self, policy: ScoringPolicy, config: RunConfig, ranks: Ranks | None = None) -> None:
        """`ranks`: over which the policy is spread; null: it is whole in this process."""
        self.policy = policy
        self.config = config
        self._ranks = ranks
        self.step = 0
        self.counters = Counters()
        self.shard_paths: dict[ShardId, str] = {}
        """Key of every shard that the buffer holds rows of."""
        trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(trained, config.objective, lora=config.model.lora is not None)
        self.buffer = ReplayBuffer(
            capacity_per_prompt=config.buffer.capacity_per_prompt,
            deduplicate=config.buffer.deduplicate,
            max_trajectories=config.buffer.max_trajectories,
        )
        self.buffer.set_reference(_reference_key(policy.reference_policy))
        self.sampler = Sampler(config.objective.seed)
        self._objective = lookup(config.objective.type)
        self._collator = Collator(self.buffer, policy)
        self._trainer: TrainerSettings | None = None
        """What the policy computes with; none before the first step."""
        self._refused: TrainerSettings | None = None

    @property
    def num_ranks(self) -> int:
        """Processes that compute each step together."""
        return 1 if self._ranks is None else self._ranks.size

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
        """Sample a batch, score it and take optimizer step `self.step + 1`.

        Raises: FloatingPointError if the gradient is not finite, nothing has changed then; UserError if the policy
        cannot compute as the first settings say. Later ones that it cannot follow are refused, and the old ones stay.
        """
        trainer = self._configure(live.trainer)
        plan = self.sampler.sample(self.buffer, self.step, self._settings(live))
        if not self.policy.caches_reference:
            self.buffer.set_reference(f"{self.step}")
        stopwatch = Stopwatch(self.policy.device)
        beta = beta_at(self.step + 1, self.config.objective)
        if self._ranks is not None:
            facts = step_facts(trainer, beta=beta, step=self.step + 1, epoch=epoch)
            self._ranks.order("step", facts, pack_batch(self.buffer, plan))
        gradient = BatchGradient(
            self.policy,
            self.buffer,
            self._collator,
            plan,
            objective=self.config.objective,
            loss=self._objective,
            beta=beta,
            stopwatch=stopwatch,
            ranks=self._ranks,
        )
        self.optimizer.zero_grad()
        gradient.run(trainer.micro_batch_tokens)
        results = gradient.collect()
        with stopwatch("optimizer"):
            update = self.optimizer.apply(self.step + 1)
            gathered = results()
            self.step += 1
            changed = self.policy.after_step(self.step, epoch)
        if changed:
            self.buffer.set_reference(_reference_key(self.policy.reference_policy))
        self._count(plan)
        self.counters.signal_groups += _num_differing(gradient.rewards, plan.weights > 0)
        return StepResult(
            plan=plan,
            loss=gathered.loss,
            beta=beta,
            ell=gathered.logprobs - gathered.reference,
            rewards=gradient.rewards,
            weights=gathered.weights,
            log_z=gathered.log_z,
            update=update,
            trained_tokens=gathered.trained_tokens,
            scored_tokens=gathered.scored_tokens,
            row_tokens=self._row_tokens(plan),
            phase_seconds=stopwatch.seconds(),
            reference_changed=changed,
        )

    # -- checkpoints

    def state(self) -> TrainerState:
        """Detached copy of everything; cheap enough to take between two steps."""
        if self._ranks is not None:
            self._ranks.order("state")
        master, reference = self.policy.master_state(), self.policy.reference_state()
        moments, norms = self.optimizer.state()
        tensors: dict[str, dict[str, Tensor]] = {
            "master": master,
            "optimizer": moments,
            "buffer": {n: torch.from_numpy(np.array(a, copy=True)) for n, a in self.buffer.state().items()},
        }
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
        moments = state.tensors["optimizer"]
        if self._ranks is not None:
            self._ranks.order("restore", {"grad_norms": facts["grad_norms"]})
        self.policy.restore(state.tensors["master"], state.tensors.get("reference"))
        self.policy.reference_policy = PolicyId(*facts["reference_policy"])
        self.optimizer.restore(
            moments.items() if self._ranks is None else self._ranks.stream(moments), facts["grad_norms"]
        )
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

    def _configure(self, wanted: TrainerSettings) -> TrainerSettings:
        """What the policy computes with from now on."""
        if self._trainer is None or wanted != self._refused:
            try:
                self.policy.configure(wanted)
                self._trainer = wanted
            except UserError as error:
                if self._trainer is None:
                    raise
                self._refused = wanted
                log.error(CONFIG_REFUSED, error=str(error))
                self.policy.configure(self._trainer)
        assert self._trainer is not None
        return self._trainer

    def _settings(self, live: LiveConfig) -> SamplingSettings:
        return SamplingSettings.from_config(self.config, live)

    def searcher_of(self, row: int) -> str:
        """Name of the searcher that made a row."""
        made = self.buffer.trajectory_ids(np.array([row]))[0]
        return ShardKey.parse(self.shard_paths[ShardId(made.incarnation, made.seq)]).searcher

    def packed(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """Buffer rows as token tensors on the policy's device."""
        return self._collator.rows(np.asarray(rows, dtype=np.int64))

    def _count(self, plan: BatchPlan) -> None:
        drawn = self.buffer.num_tokens(plan.rows).ravel()
        self.counters.trained_rows += drawn.size
        self.counters.trained_groups += len(plan.rows)
        self.counters.trained_tokens += int(drawn.sum())
        self.counters.trained_lengths.update(drawn.tolist())

    def _row_tokens(self, plan: BatchPlan) -> int:
        used = plan.weights > 0
        prompts = np.array([len(self.buffer.prompt_tokens(int(p))) for p in plan.prompt_ids])  # (P,)
        return int(self.buffer.num_tokens(plan.rows)[used].sum() + (used.sum(1) * prompts).sum())


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
        mu_logprobs=response_logprobs(batch),
    )


def response_logprobs(batch: ShardBatch) -> np.ndarray:
    """(n,) float32: log-probability of each response under the weights that sampled it; NaN where it was not told."""
    running = np.concatenate([[0.0], np.cumsum(batch.sampler_logprobs, dtype=np.float64)])
    begin, end = batch.sampler_offsets[:-1], batch.sampler_offsets[1:]
    return np.where(end > begin, running[end] - running[begin], np.nan).astype(np.float32)


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
