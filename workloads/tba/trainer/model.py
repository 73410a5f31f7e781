"""The live policy and the reference that holds it: scoring, publishing copies, resets."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from tba.contracts.config import Model, Reference, TrainerSettings
from tba.contracts.records import PolicyId
from tba.models import load_weights, weight_tensors
from tba.scoring import Rows, Scorer
from tba.trainer.memory import ActivationMemory, compile_layers
from tba.trainer.scoring_policy import require_agreement, round_as_published
from tba.trainer.working import Residence, WorkingCopy

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Policy:
    """float32 master weights of π_θ, and π_ref under the same kernels, temperature and precision.

    `model` holds the masters; what computes is `working.model`: the same in float32, else a copy (see `working`).
    """

    def __init__(self, model: nn.Module, *, config: Model, reference: Reference, temperature: float) -> None:
        self._reference_config = reference
        self.publish_dtype = DTYPES[config.dtype]
        # eval(): dropout off, or the two forward passes of one response would differ.
        self.model = model.eval()
        round_as_published(self.model, self.publish_dtype)
        self.working = WorkingCopy(self.model, self.publish_dtype)
        self.scorer = Scorer(self.working.model, temperature=temperature)
        # A moving average needs the digits that a shorter dtype would round away at each step.
        averaged = self.model if reference.type == "EMA" else self.working.model
        self.reference_model = copy.deepcopy(averaged).eval().requires_grad_(False)
        self._reference_working = WorkingCopy(self.reference_model, self.publish_dtype)
        self._reference_scorer = Scorer(
            self._reference_working.model, temperature=temperature, layout=self.scorer.layout
        )
        self._residence = Residence(self._reference_working.model, self.device)
        self.working.collect_gradients()
        self.reference_policy = PolicyId(1, 0)
        """Whose weights the reference holds; cached log-probabilities of another one are void."""
        self._memory = ActivationMemory(self.working.model, self.scorer)
        self._compiled = False
        require_agreement(self)

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return self.scorer.device

    @property
    def caches_reference(self) -> bool:
        """Whether reference log-probabilities stay valid from step to step."""
        return self._reference_config.type != "EMA"

    def configure(self, settings: TrainerSettings) -> None:
        """Apply the trainer's live settings; cheap when nothing has changed. `compile` is read the first time only.

        Raises: UserError if the model cannot do what they ask.
        """
        if settings.compile and not self._compiled and self.device.type == "cuda":
            compile_layers(self.working.model, self._reference_working.model)
            self.scorer.compile_head()
            self._reference_scorer.compile_head()
        self._compiled = True
        self._residence.offload(settings.offload_reference)
        self._memory.configure(settings)

    def pack(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Rows:
        """Rows on the device, laid out for both models."""
        return self.scorer.pack(prompts, responses)

    @torch.no_grad()
    def reference_logprobs(self, rows: Rows) -> Tensor:
        """Sums over response tokens under the reference: (B,) float32."""
        return self._reference_scorer.sequence_logprobs(rows)

    def reference_present(self) -> AbstractContextManager[None]:
        """Score under the reference within this: it may rest in host memory otherwise."""
        return self._residence.present()

    def policy_logprobs(self, rows: Rows, *, grad: bool) -> Tensor:
        """Sums over response tokens under the live policy: (B,) float32."""
        mode: AbstractContextManager[object] = nullcontext() if grad else torch.no_grad()
        with mode:
            return self.scorer.sequence_logprobs(rows)

    @torch.no_grad()
    def after_step(self, step: int, epoch: int) -> bool:
        """Compute with the new weights, and move the reference where its type says so; True if that changed."""
        self.working.refresh()
        kind = self._reference_config.type
        if kind == "EMA":
            decay = self._reference_config.decay or 0.0
            with self._residence.present(changes=True):
                for ref, live in zip(self.reference_model.parameters(), self.model.parameters(), strict=True):
                    ref.lerp_(live, 1.0 - decay)
                self._reference_working.refresh()
        elif kind == "Reset" and step % (self._reference_config.every_steps or 1) == 0:
            self.reference_model.load_state_dict(self.working.model.state_dict())
        else:
            return False
        self.reference_policy = PolicyId(epoch, step)
        return True

    def stage(self, owners: Sequence[int] = (0,)) -> dict[str, Tensor]:
        """Host copies of the weights that compute, which are the published ones; apart from them from now on."""
        del owners  # there is one process
        on_gpu = self.device.type == "cuda"
        staged: dict[str, Tensor] = {}
        for name, tensor in weight_tensors(self.working.model).items():
            staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            staged[name].copy_(tensor, non_blocking=True)
        if on_gpu:  # pinned: all copies are queued, and waited for once
            torch.cuda.current_stream(self.device).synchronize()
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
        self.working.refresh()
        if reference is not None:
            with self._residence.present(changes=True):
                load_weights(self.reference_model, reference)
                self._reference_working.refresh()
