"""A policy that trains an adapter: the base is frozen, in the dtype of computation, and there once.

The reference is the same model with the adapter off: no second copy, never offloaded, equal to version 0 always.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from tba.contracts.config import Model, Reference, TrainerSettings
from tba.contracts.errors import UserError
from tba.contracts.records import PolicyId
from tba.lora import attach, merged, recording_calls, refuse_uncalled, scale_of
from tba.models import require_fit, weight_tensors
from tba.scoring import Rows, Scorer
from tba.trainer.memory import ActivationMemory
from tba.trainer.model import DTYPES, Policy
from tba.trainer.scoring_policy import require_agreement
from tba.trainer.working import cast_parameters


def make_policy(
    model: nn.Module, *, config: Model, reference: Reference, temperature: float
) -> "Policy | AdaptedPolicy":
    """What `config` asks for, in one process. Raises: UserError."""
    kind = Policy if config.lora is None else AdaptedPolicy
    return kind(model, config=config, reference=reference, temperature=temperature)


class AdaptedPolicy:
    """π_θ = base and adapter, π_ref = base. `model` computes, and holds the adapter's float32 masters."""

    caches_reference = True
    """Reference log-probabilities stay valid: the base never changes."""

    def __init__(self, model: nn.Module, *, config: Model, reference: Reference, temperature: float) -> None:
        """Raises: UserError if the model cannot have this adapter."""
        if config.lora is None or reference.type != "Fixed":  # `refuse_unsupported` says so to people
            raise ValueError(f"an adapter needs a Fixed reference, got {config.lora} and {reference.type}")
        self.publish_dtype = DTYPES[config.dtype]
        self.model = model.eval()
        cast_parameters(model, self.publish_dtype)
        # Before the model is frozen: layouts are tried with their backward pass.
        self.scorer = Scorer(model, temperature=temperature)
        self._names = list(weight_tensors(model))
        self._scale = scale_of(config.lora)
        self.adapter = attach(model, config.lora)
        self.reference_policy = PolicyId(1, 0)
        self._memory = ActivationMemory(model, self.scorer)
        with recording_calls(self.adapter.layers) as called:
            require_agreement(self)  # an adapter that has learnt nothing changes nothing
        refuse_uncalled(self.adapter.layers, called)  # as it computes here, with the kernels of this device

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return self.scorer.device

    def configure(self, settings: TrainerSettings) -> None:
        """Apply the trainer's live settings. `offload_reference` has nothing to offload here.

        Raises: UserError if the model cannot do what they ask.
        """
        if settings.compile:
            raise UserError("model.lora goes without trainer.compile, got true: set trainer.compile: false")
        self._memory.configure(settings)

    def pack(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Rows:
        """Rows on the device."""
        return self.scorer.pack(prompts, responses)

    @torch.no_grad()
    def reference_logprobs(self, rows: Rows) -> Tensor:
        """Sums over response tokens with the adapter off: (B,) float32."""
        with self.adapter.off():
            return self.scorer.sequence_logprobs(rows)

    def reference_present(self) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    def policy_logprobs(self, rows: Rows, *, grad: bool) -> Tensor:
        """Sums over response tokens under the live policy: (B,) float32."""
        mode: AbstractContextManager[object] = nullcontext() if grad else torch.no_grad()
        with mode:
            return self.scorer.sequence_logprobs(rows)

    def after_step(self, step: int, epoch: int) -> bool:
        """Nothing to do: the masters compute, and the reference stays."""
        del step, epoch
        return False

    def stage(self, owners: Sequence[int] = (0,)) -> dict[str, Tensor]:
        """Host copies of the whole weights with the adapter merged in, in the published dtype."""
        del owners  # there is one process
        own = {name: tensor.to("cpu", copy=True) for name, tensor in self._base().items()}
        return merged(own, self.master_state(), scale=self._scale)

    def master_state(self) -> dict[str, Tensor]:
        """Host copies of the adapter, float32: what a checkpoint needs, and a snapshot after version 0."""
        return {n: t.to("cpu", copy=True) for n, t in self.adapter.tensors().items()}

    def reference_state(self) -> None:
        """The reference is version 0."""

    @torch.no_grad()
    def restore(self, master: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None) -> None:
        """Undo `master_state`. Raises: CorruptObject if it is another adapter's; nothing is changed then."""
        if reference is not None:
            raise ValueError("an adapter's reference is version 0 and never stored")
        own = self.adapter.tensors()
        require_fit(own, master)
        for name, tensor in own.items():
            tensor.copy_(master[name])

    # -- private

    def _base(self) -> dict[str, Tensor]:
        tensors = weight_tensors(self.model)
        return {name: tensors[name] for name in self._names}
