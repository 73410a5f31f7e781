"""What the learner asks of a policy, be its weights in one process (`model`) or spread over ranks (`sharded`).

And what all policies have in common: how they begin, and what must hold then.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tba.contracts.config import TrainerSettings
from tba.contracts.records import PolicyId
from tba.scoring import Rows, Scorer

AGREEMENT = 1e-3
"""Nats by which a kernel that is not deterministic may differ from itself."""


class ScoringPolicy(Protocol):
    """float32 master weights and a reference, both scored by the same kernels."""

    model: nn.Module
    scorer: Scorer
    reference_policy: PolicyId

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def caches_reference(self) -> bool:
        """Whether reference log-probabilities stay valid from step to step."""
        ...

    def configure(self, settings: TrainerSettings) -> None:
        """Apply live settings. Raises: UserError."""
        ...

    def pack(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Rows:
        """Rows on the device."""
        ...

    def reference_logprobs(self, rows: Rows) -> Tensor:
        """(B,) float32."""
        ...

    def reference_present(self) -> AbstractContextManager[None]:
        """Score under the reference within this."""
        ...

    def policy_logprobs(self, rows: Rows, *, grad: bool) -> Tensor:
        """(B,) float32."""
        ...

    def after_step(self, step: int, epoch: int) -> bool:
        """Compute with the new weights; True if the reference has changed."""
        ...

    def stage(self, owners: Sequence[int] = (0,)) -> dict[str, Tensor]:
        """Host copies in the published dtype: of the share of this rank of `owners`, among which all are dealt out."""
        ...

    def master_state(self) -> dict[str, Tensor]:
        """Host copies of the masters."""
        ...

    def reference_state(self) -> dict[str, Tensor] | None:
        """Host copies of the reference; None if it never changes."""
        ...

    def restore(self, master: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None) -> None:
        """Undo `master_state` and `reference_state`."""
        ...


@torch.no_grad()
def round_as_published(model: nn.Module, dtype: torch.dtype) -> None:
    """Version 0 as published is where policy and reference start: what the cast loses is lost in the masters too."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def require_agreement(policy: ScoringPolicy) -> None:
    """Policy and reference hold the same weights now: in one micro-batch their log-probabilities must be equal.

    Raises: RuntimeError if they are not.
    """
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    prompts = [np.array([1, 2, 3]) % vocabulary, np.array([1, 2, 3]) % vocabulary]
    rows = policy.pack(prompts, [np.array([0, 1]), np.array([1, 0, 1])])
    difference = (policy.policy_logprobs(rows, grad=False) - policy.reference_logprobs(rows)).abs().max().item()
    if not difference <= AGREEMENT:  # nor NaN
        raise RuntimeError(f"equal policy and reference must score alike, got a difference of {difference:.3g}")
