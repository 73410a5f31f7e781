"""The live policy and its reference, spread over ranks: float32 shards of the masters, gathered to compute.

It means what one process computes (`model`, `working`): the forward pass sees the published weights, gradients leave
the backward pass in the working dtype and are summed in float32 over ranks and micro-batches. Every method is one for
all ranks at once; on rank 0 those that it starts by itself give the order to the others.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from tba.contracts.config import Model, Reference, TrainerSettings
from tba.contracts.records import PolicyId
from tba.models import require_fit, weight_tensors
from tba.scoring import Rows
from tba.trainer.memory import ActivationMemory, local
from tba.trainer.model import DTYPES
from tba.trainer.ranks import Ranks
from tba.trainer.scoring_policy import require_agreement, round_as_published
from tba.trainer.sharding import agreed_choice, fill, gather, refuse_alone, shard, share


class ShardedPolicy:
    """π_θ and π_ref of several ranks; what `model.Policy` is of one process."""

    def __init__(
        self, model: nn.Module, *, config: Model, reference: Reference, temperature: float, ranks: Ranks
    ) -> None:
        """`model`: float32 in host memory, with the weights that count on rank 0.

        Raises: UserError if this model's rows cannot be packed.
        """
        self._ranks = ranks
        self._reference_config = reference
        self.publish_dtype = DTYPES[config.dtype]
        self.model = model.eval()
        whole = None
        if ranks.leads:
            round_as_published(self.model, self.publish_dtype)
            whole = weight_tensors(self.model)
        choice = agreed_choice(self.model, self.publish_dtype, temperature, ranks)
        # A moving average needs the digits that a shorter dtype would round away at each step.
        averaged = torch.float32 if reference.type == "EMA" else self.publish_dtype
        self.reference_model = _empty_copy(self.model, averaged).requires_grad_(False)
        self.scorer = choice.scorer(self.model, temperature)
        self._policy = shard(self.model, self.scorer, ranks, dtype=self.publish_dtype)
        self._reference = shard(
            self.reference_model, choice.scorer(self.reference_model, temperature), ranks, dtype=self.publish_dtype
        )
        # No rank but 0 ever holds all weights: they come after there are shards to fill.
        self._fill(self.model, whole)
        self._move_reference(1.0)
        self.reference_policy = PolicyId(1, 0)
        """Whose weights the reference holds; cached log-probabilities of another one are void."""
        self._memory = ActivationMemory(self.model, self.scorer, bytes_per_token=choice.bytes_per_token)
        require_agreement(self)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._ranks.device

    @property
    def caches_reference(self) -> bool:
        """Whether reference log-probabilities stay valid from step to step."""
        return self._reference_config.type != "EMA"

    def configure(self, settings: TrainerSettings) -> None:
        """Apply the trainer's live settings; cheap when nothing has changed.

        Raises: UserError if several ranks cannot do what they ask.
        """
        refuse_alone(settings, self._ranks)
        self._memory.configure(settings)

    def pack(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Rows:
        """Rows on the device, laid out for both models."""
        return self.scorer.pack(prompts, responses, device=self.device)

    def reference_present(self) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    @torch.no_grad()
    def reference_logprobs(self, rows: Rows) -> Tensor:
        """Sums over response tokens under the reference: (B,) float32."""
        return self._reference(rows)

    def policy_logprobs(self, rows: Rows, *, grad: bool) -> Tensor:
        """Sums over response tokens under the live policy: (B,) float32."""
        with torch.set_grad_enabled(grad):
            return self._policy(rows)

    @torch.no_grad()
    def after_step(self, step: int, epoch: int) -> bool:
        """Move the reference where its type says so; True if that changed. Each rank moves its shards."""
        kind = self._reference_config.type
        if kind == "Fixed" or (kind == "Reset" and step % (self._reference_config.every_steps or 1) != 0):
            return False
        self._move_reference(1.0 - (self._reference_config.decay or 0.0) if kind == "EMA" else 1.0)
        self.reference_policy = PolicyId(epoch, step)
        return True

    def stage(self, owners: Sequence[int] = (0,)) -> dict[str, Tensor]:
        """Host copies of this rank's share, parameters in the published dtype; empty on ranks without one."""
        self._ranks.order("stage", {"owners": list(owners)})
        tensors = weight_tensors(self.model)
        parameters = {name for name, _ in self.model.named_parameters()}
        dtypes = {name: self.publish_dtype if name in parameters else t.dtype for name, t in tensors.items()}
        published = ((name, tensor.to(dtypes[name])) for name, tensor in tensors.items())
        return gather(published, self._ranks, share(tensors, dtypes, owners))

    def master_state(self) -> dict[str, Tensor]:
        """float32 host copies for a checkpoint; empty on other ranks than 0."""
        return gather(weight_tensors(self.model).items(), self._ranks)

    def reference_state(self) -> dict[str, Tensor] | None:
        """Host copies of the reference, or None if it is version 0; empty on other ranks than 0."""
        if self._reference_config.type == "Fixed":
            return None
        return gather(weight_tensors(self.reference_model).items(), self._ranks)

    def restore(self, master: Mapping[str, Tensor] | None, reference: Mapping[str, Tensor] | None) -> None:
        """Undo `master_state` and `reference_state`. Other ranks give None twice. Raises: CorruptObject."""
        self._fill(self.model, master)
        if self._ranks.say("reference" if reference is not None else "no reference") == "reference":
            self._fill(self.reference_model, reference)

    # -- private

    @torch.no_grad()
    def _move_reference(self, weight: float) -> None:
        """Towards the policy, each rank its shards; 1: all the way."""
        for ref, live in zip(self.reference_model.parameters(), self.model.parameters(), strict=True):
            if weight == 1.0:  # what is overwritten may be no number
                local(ref).copy_(local(live))
            else:
                local(ref).lerp_(local(live).to(ref.dtype), weight)

    def _fill(self, model: nn.Module, tensors: Mapping[str, Tensor] | None) -> None:
        own = weight_tensors(model)
        if tensors is not None:
            require_fit(own, tensors)
        fill(own, tensors, self._ranks)


def _empty_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same module with parameters yet to be filled, whose memory is not touched until then."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, dtype=dtype)) for p in model.parameters()}
    return copy.deepcopy(model, memo)
