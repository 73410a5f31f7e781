"""Pushing a token down fades as it becomes improbable.

The gradient of log π does not shrink with π: a token of a bad response is pushed as hard at π = 1e-6 as at 0.5, though
nothing is left to win. On stale data such tokens pile up (their sampler still found them likely) and cancel what the
others teach; on fresh data they are seldom sampled. Below a floor ε the push follows the gradient of π / ε instead.
Source: shared/design/bench.md §4 (what fails on stale data), docs/decisions/0025-stale-data.md (what helps).
"""

from typing import Any

import torch
from torch import Tensor


class _Fade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, floor: float) -> Tensor:
        ctx.save_for_backward(logprobs)
        ctx.floor = floor
        return logprobs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logprobs,) = ctx.saved_tensors
        (grad,) = grads
        down = grad > 0  # descent lowers what has a positive gradient
        return torch.where(down, grad * (logprobs.exp() / ctx.floor).clamp(max=1.0), grad), None


def fade(logprobs: Tensor, floor: float) -> Tensor:
    """The same values, any shape; a gradient that lowers a log-probability is scaled by min(1, π / floor)."""
    return _Fade.apply(logprobs, floor) if floor > 0.0 else logprobs  # type: ignore[return-value]
