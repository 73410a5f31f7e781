"""The live policy and its reference, spread over ranks by FSDP2: float32 shards of the masters, gathered to compute.

```
shards (float32) ─ cast ─ gather ─► layer (working dtype) ─► forward, backward ─ sum over ranks, float32 ─► shards
```
It means what one process computes (`model`, `working`): the forward pass sees the published weights, gradients leave
the backward pass in the working dtype and are summed in float32 over ranks and micro-batches. Every method is one for
all ranks at once; on rank 0 those that it starts by itself give the order to the others.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tba.contracts.config import Model, Reference, TrainerSettings
from tba.contracts.errors import UserError
from tba.contracts.records import PolicyId
from tba.models import require_fit, weight_tensors
from tba.scoring import Layout, Rows, Scorer
from tba.trainer.memory import ActivationMemory, activation_bytes, layers_of, local
from tba.trainer.model import DTYPES
from tba.trainer.optim import shard_like
from tba.trainer.ranks import Ranks
from tba.trainer.scoring_policy import require_agreement, round_as_published
from tba.trainer.working import cast_parameters


class ShardedPolicy:
    """π_θ and π_ref of several ranks; what `model.Policy` is of one process."""

    def __init__(
        self, model: nn.Module, *, config: Model, reference: Reference, temperature: float, ranks: Ranks
    ) -> None:
        """`model`: float32 in host memory, with the weights that count on rank 0.

        Raises: UserError if this model's rows cannot be packed, or for LoRA.
        """
        if config.lora is not None:
            raise UserError("model.lora with several trainer ranks is not supported: set trainer.gpusPerNode: 1")
        self._ranks = ranks
        self._reference_config = reference
        self.publish_dtype = DTYPES[config.dtype]
        self.model = model.eval()
        whole, found = None, None
        if ranks.leads:
            round_as_published(self.model, self.publish_dtype)
            whole, found = weight_tensors(self.model), _try_out(self.model, self.publish_dtype, temperature, ranks)
        choice = self._agree(found)
        # A moving average needs the digits that a shorter dtype would round away at each step.
        averaged = torch.float32 if reference.type == "EMA" else self.publish_dtype
        self.reference_model = _empty_copy(self.model, averaged).requires_grad_(False)
        self.scorer = Scorer(self.model, temperature=temperature, layout=choice.layout)
        self.scorer.refused = dict(choice.refused)
        self._policy = self._shard(self.model, self.scorer)
        self._reference = self._shard(
            self.reference_model, Scorer(self.reference_model, temperature=temperature, layout=choice.layout)
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
        asked = {"compile": settings.compile, "offloadReference": settings.offload_reference}
        if refused := [name for name, wanted in asked.items() if wanted]:
            raise UserError(f"trainer.{refused[0]}: true works on one GPU, got {self._ranks.size} ranks: set it false")
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

    def stage(self) -> dict[str, Tensor]:
        """Host copies, parameters in the published dtype; empty on other ranks than 0."""
        self._ranks.order("stage")
        parameters = {name for name, _ in self.model.named_parameters()}
        return self._gather(
            (name, tensor.to(self.publish_dtype) if name in parameters else tensor)
            for name, tensor in weight_tensors(self.model).items()
        )

    def master_state(self) -> dict[str, Tensor]:
        """float32 host copies for a checkpoint; empty on other ranks than 0."""
        return self._gather(weight_tensors(self.model).items())

    def reference_state(self) -> dict[str, Tensor] | None:
        """Host copies of the reference, or None if it is version 0; empty on other ranks than 0."""
        if self._reference_config.type == "Fixed":
            return None
        return self._gather(weight_tensors(self.reference_model).items())

    def restore(self, master: Mapping[str, Tensor] | None, reference: Mapping[str, Tensor] | None) -> None:
        """Undo `master_state` and `reference_state`. Other ranks give None twice. Raises: CorruptObject."""
        self._fill(self.model, master)
        if self._ranks.say("reference" if reference is not None else "no reference") == "reference":
            self._fill(self.reference_model, reference)

    # -- private

    def _agree(self, choice: "_Choice | None") -> "_Choice":
        """Rank 0's, on all ranks. Raises: UserError if rows cannot be packed."""
        told = self._ranks.say("" if choice is None else json.dumps(asdict(choice)))
        choice = _Choice(**json.loads(told))
        if choice.layout == "padded":
            raise UserError(
                f"{type(self.model).__name__} cannot compute packed rows, which several ranks need: "
                f"set trainer.gpusPerNode: 1 ({choice.refused})"
            )
        return choice

    @torch.no_grad()
    def _move_reference(self, weight: float) -> None:
        """Towards the policy, each rank its shards; 1: all the way."""
        for ref, live in zip(self.reference_model.parameters(), self.model.parameters(), strict=True):
            if weight == 1.0:  # what is overwritten may be no number
                local(ref).copy_(local(live))
            else:
                local(ref).lerp_(local(live).to(ref.dtype), weight)

    def _shard(self, model: nn.Module, scorer: Scorer) -> nn.Module:
        """A module whose call scores rows; the parameters of `model` are shards from now on."""
        shorter = self.publish_dtype if any(p.dtype != self.publish_dtype for p in model.parameters()) else None
        precision = MixedPrecisionPolicy(shorter, torch.float32, cast_forward_inputs=False)
        root = _Scoring(model, scorer)
        for module in (*layers_of(model), root):
            # Gathered anew after each forward pass, the root too: else it would keep old weights over a step.
            fully_shard(module, mesh=self._ranks.mesh, mp_policy=precision, reshard_after_forward=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):  # each rank's share is of the whole batch: gradients add up
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return root

    @torch.no_grad()
    def _gather(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        gathered: dict[str, Tensor] = {}
        for name, tensor in tensors:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._ranks.leads:
                gathered[name] = whole.detach().to("cpu", copy=True)
        return gathered

    @torch.no_grad()
    def _fill(self, model: nn.Module, tensors: Mapping[str, Tensor] | None) -> None:
        own = weight_tensors(model)
        if tensors is not None:
            require_fit(own, tensors)
        for name, whole in self._ranks.stream(tensors):
            target, placed = own[name], whole.to(self.device)
            local(target).copy_(local(shard_like(target, placed)) if isinstance(target, DTensor) else placed)


@dataclass(frozen=True, slots=True)
class _Choice:
    """How rank 0 found that this model computes best."""

    layout: Layout
    refused: dict[Layout, str]
    bytes_per_token: float | None
    """Of activations, on a GPU."""


def _try_out(model: nn.Module, dtype: torch.dtype, temperature: float, ranks: Ranks) -> _Choice:
    """With all weights in one place: layers cannot run alone once they are shards."""
    working = copy.deepcopy(model)
    cast_parameters(working, dtype)
    scorer = Scorer(working.to(ranks.device), temperature=temperature)
    measured = activation_bytes(working, scorer) if ranks.device.type == "cuda" else None
    return _Choice(scorer.layout, scorer.refused, measured)


def _empty_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same module with parameters yet to be filled, whose memory is not touched until then."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, dtype=dtype)) for p in model.parameters()}
    return copy.deepcopy(model, memo)


class _Scoring(nn.Module):
    """Root of FSDP2's modules: embeddings and output embedding are whole within its call."""

    def __init__(self, model: nn.Module, scorer: Scorer) -> None:
        super().__init__()
        self.model = model
        self._scorer = scorer

    def forward(self, rows: Rows) -> Tensor:
        """Sums over response tokens: (B,) float32."""
        return self._scorer.sequence_logprobs(rows)
