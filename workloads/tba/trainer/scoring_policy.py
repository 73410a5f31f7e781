"""What the learner asks of a policy, be its weights in one process (`model`) or spread over ranks (`sharded`)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tba.contracts.config import TrainerSettings
from tba.contracts.records import PolicyId
from tba.scoring import Rows, Scorer


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

    def stage(self) -> dict[str, Tensor]:
        """Host copies in the published dtype."""
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
