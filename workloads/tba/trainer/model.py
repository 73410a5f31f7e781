"""The live policy and the reference that holds it: scoring, publishing copies, resets."""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from tba.contracts.config import Model, Reference
from tba.contracts.records import PolicyId
from tba.models import load_weights, weight_tensors
from tba.scoring import Rows, Scorer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Policy:
    """float32 master weights of π_θ, and π_ref under the same kernel, temperature and precision."""

    def __init__(self, model: nn.Module, *, config: Model, reference: Reference, temperature: float) -> None:
        self._reference_config = reference
        self.publish_dtype = DTYPES[config.dtype]
        # eval(): dropout off, or the two forward passes of one response would differ.
        self.model = model.eval()
        with torch.no_grad():
            # Version 0 as published is where both start: what the cast loses must be lost here too.
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(self.publish_dtype))
        self.reference_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.scorer = Scorer(self.model, temperature=temperature, compute_dtype=self.publish_dtype)
        self._reference_scorer = Scorer(self.reference_model, temperature=temperature, compute_dtype=self.publish_dtype)
        self.reference_policy = PolicyId(1, 0)
        """Whose weights the reference holds; cached log-probabilities of another one are void."""

    @property
    def device(self) -> torch.device:
        """Where both models live."""
        return self.scorer.device

    @property
    def caches_reference(self) -> bool:
        """Whether reference log-probabilities stay valid from step to step."""
        return self._reference_config.type != "EMA"

    @torch.no_grad()
    def reference_logprobs(self, rows: Rows) -> Tensor:
        """Sums over response tokens under the reference: (B,) float32."""
        return self._reference_scorer.sequence_logprobs(rows)

    def policy_logprobs(self, rows: Rows, *, grad: bool) -> Tensor:
        """Sums over response tokens under the live policy: (B,) float32."""
        mode: AbstractContextManager[object] = nullcontext() if grad else torch.no_grad()
        with mode:
            return self.scorer.sequence_logprobs(rows)

    @torch.no_grad()
    def after_step(self, step: int, epoch: int) -> bool:
        """Move the reference where its type says so; True if it changed."""
        kind = self._reference_config.type
        if kind == "EMA":
            decay = self._reference_config.decay or 0.0
            for ref, live in zip(self.reference_model.parameters(), self.model.parameters(), strict=True):
                ref.lerp_(live, 1.0 - decay)
        elif kind == "Reset" and step % (self._reference_config.every_steps or 1) == 0:
            self.reference_model.load_state_dict(self.model.state_dict())
        else:
            return False
        self.reference_policy = PolicyId(epoch, step)
        return True

    def stage(self) -> dict[str, Tensor]:
        """Host copies, parameters in the published dtype, apart from the live weights from now on."""
        parameters = {name for name, _ in self.model.named_parameters()}
        staged: dict[str, Tensor] = {}
        for name, tensor in weight_tensors(self.model).items():
            # A buffer is no weight: a cast may ruin it (a table of frequencies), and training does not cast it either.
            dtype = self.publish_dtype if name in parameters else tensor.dtype
            staged[name] = tensor.detach().to(dtype).to("cpu", copy=dtype == tensor.dtype)
        return staged

    def master_state(self) -> dict[str, Tensor]:
        """float32 host copies for a checkpoint."""
        return {n: t.detach().to("cpu", copy=True) for n, t in weight_tensors(self.model).items()}

    def reference_state(self) -> dict[str, Tensor] | None:
        """Host copies of the reference, or None if it is version 0."""
        if self._reference_config.type == "Fixed":
            return None
        return {n: t.detach().to("cpu", copy=True) for n, t in weight_tensors(self.reference_model).items()}

    def restore(self, master: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None) -> None:
        """Undo `master_state` and `reference_state`."""
        load_weights(self.model, master)
        if reference is not None:
            load_weights(self.reference_model, reference)
