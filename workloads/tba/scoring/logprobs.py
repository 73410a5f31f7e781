"""Log-probability of given tokens under logits that never exist all at once.

Letters: N places of hidden states, n tokens, D hidden size, V vocabulary. For each chunk of tokens: c = chunk.

```
forward   raw = h Wᵀ → z = transform(raw) → log π = z_target − logsumexp(z)        one matmul; statistics in float32
backward  raw, z again (or kept, if one chunk holds all) → g = softmax(z) − onehot → dh = −w·(g W), dW = −gᵀ(w·h)
```
w is the gradient that reaches each log-probability. It is known only after all of them are (an advantage depends on the
whole group), so one more matmul in the backward pass is the least, short of keeping n x V probabilities: dh alone could
be made ready in the forward pass (W_target − p W needs no w), but dW needs the probabilities again, and both ways cost
four matmuls. That changes only for a frozen head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK_BYTES = {"cpu": 64 * 1024**2, "cuda": 256 * 1024**2}
"""Logits alive at once, in the dtype of computation."""


@dataclass(frozen=True, slots=True)
class Transform:
    """What becomes of a model's raw logits: cap(raw x multiply) / temperature."""

    multiply: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @property
    def identity(self) -> bool:
        """Whether nothing becomes of them."""
        return self.multiply == 1.0 and self.cap is None and self.temperature == 1.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Same shape; float32 at least, unless nothing changes."""
        if self.identity:
            return raw
        z = raw.to(torch.promote_types(raw.dtype, torch.float32)) * self.multiply
        if self.cap is not None:
            z = torch.tanh(z / self.cap) * self.cap
        return z / self.temperature

    def slope(self, z: Tensor) -> Tensor | float:
        """Derivative by raw, as a function of the result."""
        factor = self.multiply / self.temperature
        if self.cap is None:
            return factor
        return (1.0 - (z * (self.temperature / self.cap)).square()) * factor


def _statistics(raw: Tensor, target: Tensor, transform: Transform) -> Tensor:
    """log π of the targets: (c, V), (c,) -> (c,) float32."""
    z = transform(raw)
    # The float32 result is written, but never the float32 input: the kernel converts as it reads.
    logprobs = z.log_softmax(-1, dtype=torch.promote_types(z.dtype, torch.float32))
    return logprobs.gather(1, target[:, None])[:, 0]


def _slope(raw: Tensor, target: Tensor, logprob: Tensor, transform: Transform) -> Tensor:
    """−d log π / d raw = (softmax − onehot) x slope: (c, V) in the dtype of raw."""
    z = transform(raw)
    # p − 1 from log p: for a likely token the difference of rounded numbers would be 0.
    g = z.softmax(-1).scatter_(1, target[:, None], torch.expm1(logprob)[:, None].to(z.dtype))
    if not transform.identity:
        g = g * transform.slope(z)
    return g.to(raw.dtype)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The elementwise parts, as they are or compiled into one pass over the logits each."""

    statistics: Callable[[Tensor, Tensor, Transform], Tensor] = _statistics
    slope: Callable[[Tensor, Tensor, Tensor, Transform], Tensor] = _slope


def compiled_kernels() -> Kernels:
    """By torch.compile, for any number of tokens. Compilation itself happens at first use."""
    return Kernels(torch.compile(_statistics, dynamic=True), torch.compile(_slope, dynamic=True))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        source: Tensor,
        target: Tensor,
        transform: Transform,
        kernels: Kernels,
        chunk: int,
    ) -> Tensor:
        pieces, kept = [], None
        for places, tokens in zip(source.split(chunk), target.split(chunk), strict=True):
            raw = linear(hidden.index_select(0, places), weight, bias)
            pieces.append(kernels.statistics(raw, tokens, transform))
            kept = raw if len(tokens) == len(target) else None
            del raw
        logprobs = torch.cat(pieces)
        ctx.save_for_backward(hidden, weight, bias, source, target, logprobs, kept)
        ctx.transform, ctx.kernels, ctx.chunk = transform, kernels, chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, source, target, logprobs, kept = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # Sums over chunks in float32: tokens may share a place, and the head sees every chunk.
        exact = torch.promote_types(hidden.dtype, torch.float32)
        d_hidden = torch.zeros(hidden.shape, dtype=exact, device=hidden.device) if for_hidden else None
        d_bias = torch.zeros(bias.shape, dtype=exact, device=hidden.device) if for_bias else None
        d_weight: Tensor | None = None
        parts = zip(*(x.split(ctx.chunk) for x in (source, target, logprobs, -grads[0])), strict=True)
        for places, tokens, logprob, minus_w in parts:
            h = hidden.index_select(0, places)
            raw = kept if kept is not None else linear(h, weight, bias)
            g = ctx.kernels.slope(raw, tokens, logprob, ctx.transform)  # (c, V)
            del raw
            if d_hidden is not None:
                d_hidden.index_add_(0, places, (g @ weight).to(exact) * minus_w[:, None])
            if for_weight:
                part = _outer(g, (h.to(exact) * minus_w[:, None]).to(h.dtype))
                d_weight = part if d_weight is None else d_weight.add_(part)
            if d_bias is not None:
                d_bias += minus_w @ g.to(exact)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _outer(g: Tensor, h: Tensor) -> Tensor:
    """gᵀ h: (V, D), float32 out of half-precision operands where the device can."""
    if g.is_cuda and g.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(g.T, h, out_dtype=torch.float32)
    return (g.T @ h).to(torch.promote_types(g.dtype, torch.float32))


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: Tensor,
    target: Tensor,
    *,
    transform: Transform = Transform(),
    kernels: Kernels = Kernels(),
    chunk_bytes: int | None = None,
) -> Tensor:
    """log π of n tokens, each predicted by the hidden state at `source`: (N, D), (V, D), (n,) twice -> (n,) float32.

    Differentiable in hidden, weight and bias.
    """
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"])
    chunk = max(1, chunk_bytes // (weight.shape[0] * weight.element_size()))
    arguments = (hidden, weight, bias, source, target, transform, kernels, chunk)
    return _TokenLogprobs.apply(*arguments)  # type: ignore[return-value]
