"""A policy of several ranks that trains an adapter: shards of the frozen base, and the whole adapter on each rank.

It means what `adapted` computes. An adapter is small: its gradients are summed over ranks once a step
(`BatchGradient`), and each rank takes the same optimizer step. Shards of the base are in the dtype of computation.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from tba.contracts.config import Model, Reference, TrainerSettings
from tba.contracts.records import PolicyId
from tba.lora import A, B, attach, merged, recording_calls, refuse_uncalled, scale_of
from tba.models import require_fit, weight_tensors
from tba.scoring import Rows
from tba.trainer.memory import ActivationMemory
from tba.trainer.model import DTYPES
from tba.trainer.ranks import Ranks
from tba.trainer.scoring_policy import require_agreement
from tba.trainer.sharded import ShardedPolicy
from tba.trainer.sharding import agreed_choice, fill, gather, refuse_alone, shard, share
from tba.trainer.working import cast_parameters


def make_sharded_policy(
    model: nn.Module, *, config: Model, reference: Reference, temperature: float, ranks: Ranks
) -> "ShardedPolicy | ShardedAdaptedPolicy":
    """What `config` asks for, over these ranks: all of them at once. Raises: UserError."""
    kind = ShardedPolicy if config.lora is None else ShardedAdaptedPolicy
    return kind(model, config=config, reference=reference, temperature=temperature, ranks=ranks)


class ShardedAdaptedPolicy:
    """π_θ = base and adapter, π_ref = base, over several ranks."""

    caches_reference = True
    """Reference log-probabilities stay valid: the base never changes."""

    def __init__(
        self, model: nn.Module, *, config: Model, reference: Reference, temperature: float, ranks: Ranks
    ) -> None:
        """`model`: in host memory, with the weights that count on rank 0.

        Raises: UserError if the model cannot have this adapter, or its rows cannot be packed.
        """
        if config.lora is None or reference.type != "Fixed":  # `refuse_unsupported` says so to people
            raise ValueError(f"an adapter needs a Fixed reference, got {config.lora} and {reference.type}")
        self._ranks = ranks
        dtype = DTYPES[config.dtype]
        self.model = model.eval()
        cast_parameters(model, dtype)
        # Before the model is frozen: layouts are tried with their backward pass.
        choice = agreed_choice(model, dtype, temperature, ranks)
        base = weight_tensors(model) if ranks.leads else None
        self._names = list(weight_tensors(model))
        self._scale = scale_of(config.lora)
        self.adapter = attach(model, config.lora)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:  # what is no shard is not moved either
            parameter.data = parameter.data.to(ranks.device)
        self.scorer = choice.scorer(model, temperature)
        self._policy = shard(model, self.scorer, ranks, dtype=dtype, whole=trained)
        fill(self._base(), base, ranks)
        self.reference_policy = PolicyId(1, 0)
        self._memory = ActivationMemory(model, self.scorer, bytes_per_token=choice.bytes_per_token)
        with recording_calls(self.adapter.layers) as called:
            require_agreement(self)
        refuse_uncalled(self.adapter.layers, called)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._ranks.device

    def configure(self, settings: TrainerSettings) -> None:
        """Apply the trainer's live settings. Raises: UserError if several ranks cannot do what they ask."""
        refuse_alone(settings, self._ranks)
        self._memory.configure(settings)

    def pack(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Rows:
        """Rows on the device."""
        return self.scorer.pack(prompts, responses, device=self.device)

    def reference_present(self) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    @torch.no_grad()
    def reference_logprobs(self, rows: Rows) -> Tensor:
        """Sums over response tokens with the adapter off: (B,) float32."""
        with self.adapter.off():
            return self._policy(rows)

    def policy_logprobs(self, rows: Rows, *, grad: bool) -> Tensor:
        """Sums over response tokens under the live policy: (B,) float32."""
        with torch.set_grad_enabled(grad):
            return self._policy(rows)

    def after_step(self, step: int, epoch: int) -> bool:
        """Nothing to do: the masters compute, and the reference stays."""
        del step, epoch
        return False

    def stage(self, owners: Sequence[int] = (0,)) -> dict[str, Tensor]:
        """Host copies of this rank's share of the weights with the adapter merged in; empty on ranks without one.

        Each rank has the whole adapter.
        """
        self._ranks.order("stage", {"owners": list(owners)})
        whole = self._base()
        base = gather(whole.items(), self._ranks, share(whole, {n: t.dtype for n, t in whole.items()}, owners))
        adapter = {
            name: tensor.detach().to("cpu")
            for name, tensor in self.adapter.tensors().items()
            if f"{name.removesuffix(A).removesuffix(B)}.weight" in base
        }
        return merged(base, adapter, scale=self._scale) if adapter else base

    def master_state(self) -> dict[str, Tensor]:
        """Host copies of the adapter, float32; empty on other ranks than 0, which hold the same."""
        return gather(self.adapter.tensors().items(), self._ranks)

    def reference_state(self) -> None:
        """The reference is version 0."""

    def restore(self, master: Mapping[str, Tensor] | None, reference: Mapping[str, Tensor] | None) -> None:
        """Undo `master_state`. Other ranks give None. Raises: CorruptObject if it is another adapter's."""
        if reference is not None:
            raise ValueError("an adapter's reference is version 0 and never stored")
        own = self.adapter.tensors()
        if master is not None:
            require_fit(own, master)
        fill(own, master, self._ranks)

    # -- private

    def _base(self) -> dict[str, Tensor]:
        tensors = weight_tensors(self.model)
        return {name: tensors[name] for name in self._names}
