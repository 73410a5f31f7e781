"""What the backward pass keeps in memory: whether layers are recomputed, and whether they are compiled.

Whether activations fit is measured, not guessed from shapes: a short forward pass with gradients tells bytes a token.
"""

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tba.contracts.config import TrainerSettings
from tba.contracts.errors import UserError
from tba.log import ACTIVATIONS_PLANNED, log
from tba.scoring import Scorer

HEADROOM = 0.8
"""Share of free memory that activations may take: fragmentation, logits and kernels' own need the rest."""
STATE_BYTES = 12
"""A parameter's gradient and two moments, float32: not there yet when the first step is planned."""
PROBE_TOKENS = 256


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def needs_checkpointing(bytes_per_token: float, budget_tokens: int, free_bytes: int) -> bool:
    """Whether a micro-batch's activations would take more than a safe share of what is free."""
    return bytes_per_token * budget_tokens > HEADROOM * free_bytes


def spare_bytes(free: int, total: int, own: int, engine_share: float) -> int:
    """What of a GPU's `free` bytes stays free beside a colocated engine, be its share taken yet or not.

    `own`: what this process holds there.
    """
    return min(free, round(total * (1 - engine_share)) - own)


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The decoder layers that transformers can recompute."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def set_checkpointing(model: nn.Module, wanted: bool) -> None:
    """Recompute each decoder layer in the backward pass, or keep its activations.

    Raises: UserError if `wanted` and transformers cannot do that with this model.
    """
    layers = layers_of(model)
    if not wanted:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False
        return
    if not layers or not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"trainer.activationCheckpointing: {type(model).__name__} has no layers that can be recomputed: set Never"
        )
    # No dropout anywhere: random states need not be kept.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})  # type: ignore[operator]
    for layer in layers:
        # The switch is read in training mode only. Nothing but the layer itself enters it: its modules stay in eval.
        layer.training = True


def compile_layers(*models: nn.Module) -> None:
    """Compile each decoder layer, for any number of tokens. Compilation itself happens at first use."""
    for model in models:
        for layer in layers_of(model):
            layer.compile(dynamic=True)


class ActivationMemory:
    """Decides about checkpointing for one model, anew when the settings change."""

    def __init__(self, model: nn.Module, scorer: Scorer, *, bytes_per_token: float | None = None) -> None:
        """`bytes_per_token`: measured before, where the model cannot be run alone."""
        self._model = model
        self._scorer = scorer
        self._decided: tuple[str, int, float] | None = None
        self._bytes_per_token = bytes_per_token

    def configure(self, settings: TrainerSettings) -> None:
        """Turn checkpointing on or off as the settings say. Raises: UserError for Always where it cannot be."""
        engine = settings.colocated_searcher
        share = engine.memory_fraction if engine.enabled is True and not engine.free_memory else 0.0
        wanted = (settings.activation_checkpointing, settings.micro_batch_tokens, share)
        if wanted == self._decided:
            return
        mode, budget, _ = wanted
        on_gpu = self._scorer.device.type == "cuda"
        use = mode == "Always"
        if mode == "Auto" and on_gpu and layers_of(self._model):
            use = self._would_not_fit(budget, share)
        set_checkpointing(self._model, use)
        if on_gpu:
            measured = None if self._bytes_per_token is None else round(self._bytes_per_token)
            log.info(ACTIVATIONS_PLANNED, mode=mode, recomputed=use, bytes_per_token=measured, budget_tokens=budget)
        self._decided = wanted

    def _would_not_fit(self, budget: int, engine_share: float) -> bool:
        device = self._scorer.device
        if self._bytes_per_token is None:
            set_checkpointing(self._model, False)
            self._bytes_per_token = activation_bytes(self._model, self._scorer)
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        free = spare_bytes(free, total, reserved, engine_share) + reserved - torch.cuda.memory_allocated(device)
        missing = sum(local(p).numel() * STATE_BYTES for p in self._model.parameters() if p.requires_grad)
        if self._decided is not None:  # a step has been taken: moments are there
            missing = 0
        return needs_checkpointing(self._bytes_per_token, budget, free - missing)


def activation_bytes(model: nn.Module, scorer: Scorer) -> float:
    """Bytes that a forward pass with gradients keeps, a token. On a GPU."""
    device = scorer.device
    prompts = [np.zeros(PROBE_TOKENS, np.int64)]
    rows = scorer.pack(prompts, [np.zeros(1, np.int64)])
    trained = next(p for p in model.parameters() if p.requires_grad)  # the embedding, unless that is frozen
    with torch.enable_grad():
        # Not `backward`: no parameter is to get a gradient of it. Kernels' workspaces are there from now on.
        torch.autograd.grad(scorer.token_logprobs(rows).sum(), trained)
        before = torch.cuda.memory_allocated(device)
        kept = scorer.token_logprobs(rows)
    used = torch.cuda.memory_allocated(device) - before
    del kept
    return used / rows.num_tokens
