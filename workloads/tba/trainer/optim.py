"""AdamW on float32 master weights with the job's schedule and gradient clipping."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tba.contracts.config import Objective
from tba.objectives.schedules import learning_rate

CLIP_WINDOW = 101
"""Gradient norms the running median of `maxGradNorm: auto` is taken over."""
CLIP_FACTOR = 3.0
CLIP_WARMUP = 5
"""Norms seen before `auto` clips at all."""


def default_learning_rate(num_parameters: int, *, lora: bool = False) -> float:
    """A starting guess by size, said so in the log: 1e-5 below 1B, 3e-6 up to 8B, 1e-6 above; 5e-5 for LoRA."""
    if lora:
        return 5e-5
    if num_parameters < 1_000_000_000:
        return 1e-5
    return 3e-6 if num_parameters <= 8_000_000_000 else 1e-6


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float  # before clipping
    clipped: bool
    learning_rate: float


class Optimizer:
    """One AdamW update a step; named state, so that a checkpoint does not depend on parameter order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], objective: Objective, *, lora: bool = False) -> None:
        self._objective = objective
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        count = sum(p.numel() for p in self._parameters)
        self.peak = objective.learning_rate or default_learning_rate(count, lora=lora)
        settings = objective.optimizer
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=self.peak,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,  # one pass over weights, gradients and moments
        )
        self._norms: deque[float] = deque(maxlen=CLIP_WINDOW)

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def apply(self, step: int) -> Update:
        """Clip and apply the accumulated gradients as optimizer step `step` (from 1).

        Raises: FloatingPointError if the gradient is not finite.
        """
        limit = self._limit()
        grads = [p.grad for p in self._parameters if p.grad is not None]
        total = _whole(get_total_norm(grads))  # over all ranks
        norm = float(total)  # the one point of a step at which the host waits for a GPU
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"gradient norm at step {step} is {norm}: lower learningRate, raise beta, or scale huge rewards down"
            )
        self._norms.append(norm)
        clipped = limit is not None and norm > limit
        if limit is not None and clipped:
            clip_grads_with_norm_(self._parameters, limit, total)
        rate = learning_rate(step, self._objective.schedule, self._objective.total_steps, self.peak)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        return Update(norm, clipped, rate)

    def state(self, *, keep: bool = True) -> tuple[dict[str, Tensor], list[float]]:
        """Host copies of the moments by parameter name, and the recent gradient norms. All ranks at once.

        `keep`: false on ranks that only help to gather; their copies would be memory for nothing.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            for key, value in self._adamw.state.get(parameter, {}).items():
                whole = _whole(value.detach())
                if keep:
                    tensors[f"{key}/{name}"] = whole.to("cpu", copy=True)
        return tensors, list(self._norms)

    def restore(self, tensors: Iterable[tuple[str, Tensor]], norms: Sequence[float]) -> None:
        """Undo `state`. Raises: KeyError if a tensor names an unknown parameter."""
        by_name = dict(zip(self._names, self._parameters, strict=True))
        self._adamw.state.clear()
        for full, value in tensors:
            key, name = full.split("/", 1)
            parameter = by_name[name]
            # The fused kernel counts steps beside the moments.
            placed = value.to(parameter.device, copy=True)
            if isinstance(parameter, DTensor) and value.shape == parameter.shape:
                placed = shard_like(parameter, placed)
            self._adamw.state.setdefault(parameter, {})[key] = placed
        self._norms = deque(norms, maxlen=CLIP_WINDOW)

    def _limit(self) -> float | None:
        setting = self._objective.optimizer.max_grad_norm
        if setting is None or self._objective.loss_scale == "Paper":
            return None
        if setting == "auto":
            # Steps without any signal (norm 0) say nothing about scale: a limit of 0 would erase the first real one.
            norms = [norm for norm in self._norms if norm > 0]
            return CLIP_FACTOR * median(norms) if len(norms) >= CLIP_WARMUP else None
        return float(setting)


def shard_like(like: DTensor, whole: Tensor) -> DTensor:
    """This rank's part of a tensor that all ranks have on their device."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
