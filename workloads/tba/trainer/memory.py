"""What the backward pass keeps in memory: which recomputation is chosen, and whether layers are compiled.

Whether activations fit is measured, not guessed from shapes: a short forward pass with gradients tells bytes a token.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tba.contracts.config import TrainerSettings
from tba.contracts.errors import UserError
from tba.log import ACTIVATIONS_PLANNED, log
from tba.scoring import Scorer
from tba.trainer.recomputation import Recomputation, layers_of, set_recomputation

HEADROOM = 0.8
"""Share of free memory that activations may take: fragmentation, logits and kernels' own need the rest."""
STATE_BYTES = 12
"""A parameter's gradient and two moments, float32: not there yet when the first step is planned."""
PROBE_TOKENS = 256


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cheapest_that_fits(
    bytes_per_token: Mapping[Recomputation, float], budget_tokens: int, free_bytes: int
) -> Recomputation:
    """The least recomputation with which a micro-batch's activations take a safe share of what is free at most."""
    for level in ("none", "selective"):
        if level in bytes_per_token and bytes_per_token[level] * budget_tokens <= HEADROOM * free_bytes:
            return level
    return "full"


def spare_bytes(free: int, total: int, own: int, engine_share: float) -> int:
    """What of a GPU's `free` bytes stays free beside a colocated engine, be its share taken yet or not.

    `own`: what this process holds there.
    """
    return min(free, round(total * (1 - engine_share)) - own)


def compile_layers(*models: nn.Module) -> None:
    """Compile each decoder layer, for any number of tokens. Compilation itself happens at first use."""
    for model in models:
        for layer in layers_of(model):
            layer.compile(dynamic=True)


class ActivationMemory:
    """Decides about recomputation for one model, anew when the settings change."""

    def __init__(
        self, model: nn.Module, scorer: Scorer, *, bytes_per_token: Mapping[Recomputation, float] | None = None
    ) -> None:
        """`bytes_per_token`: of `activation_bytes`, measured before where the model cannot be run alone."""
        self._model = model
        self._scorer = scorer
        self._decided: tuple[str, int, float, bool] | None = None
        self._bytes_per_token = bytes_per_token

    def configure(self, settings: TrainerSettings) -> None:
        """Recompute as the settings say. Raises: UserError for what cannot be."""
        engine = settings.colocated_searcher
        share = engine.memory_fraction if engine.enabled is True and not engine.free_memory else 0.0
        mode, budget = settings.activation_checkpointing, settings.micro_batch_tokens
        wanted = (mode, budget, share, settings.compile)
        if wanted == self._decided:
            return
        on_gpu = self._scorer.device.type == "cuda"
        use: Recomputation = "none"
        if mode in _BY_MODE:
            use = _BY_MODE[mode]
        elif on_gpu and layers_of(self._model):
            use = self._cheapest_that_fits(budget, share, compiled=settings.compile)
        if use == "selective" and on_gpu and layers_of(self._model) and use not in self._measured():
            raise UserError(
                f"trainer.activationCheckpointing: layers of {type(self._model).__name__} do not give the same twice, "
                "or change what is kept, got Selective: set Always or Never"
            )
        set_recomputation(self._model, use)
        if on_gpu:
            measured = {level: round(size) for level, size in (self._bytes_per_token or {}).items()}
            log.info(ACTIVATIONS_PLANNED, mode=mode, recomputed=use, bytes_per_token=measured, budget_tokens=budget)
        self._decided = wanted

    def _measured(self) -> Mapping[Recomputation, float]:
        """Of `activation_bytes`."""
        if self._bytes_per_token is None:
            self._bytes_per_token = activation_bytes(self._model, self._scorer)
        return self._bytes_per_token

    def _cheapest_that_fits(self, budget: int, engine_share: float, *, compiled: bool) -> Recomputation:
        device, measured = self._scorer.device, dict(self._measured())
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        free = spare_bytes(free, total, reserved, engine_share) + reserved - torch.cuda.memory_allocated(device)
        missing = sum(local(p).numel() * STATE_BYTES for p in self._model.parameters() if p.requires_grad)
        if self._decided is not None:  # a step has been taken: moments are there
            missing = 0
        if compiled:
            measured.pop("selective", None)
        return cheapest_that_fits(measured, budget, free - missing)


_BY_MODE: Mapping[str, Recomputation] = {"Never": "none", "Selective": "selective", "Always": "full"}


def activation_bytes(model: nn.Module, scorer: Scorer) -> dict[Recomputation, float]:
    """Bytes that a forward pass with gradients keeps, a token, by what is recomputed. On a GPU.

    Without "selective" where that does not work: for a layer that is not the same twice, or changes what is kept.
    """
    found: dict[Recomputation, float] = {}
    try:
        for level in ("none", "selective"):
            set_recomputation(model, level)
            found[level] = _bytes_kept(scorer, next(p for p in model.parameters() if p.requires_grad))
    except (RuntimeError, UserError) as error:
        if "none" not in found or isinstance(error, torch.OutOfMemoryError):
            raise
    finally:
        set_recomputation(model, "none")
    return found


def _bytes_kept(scorer: Scorer, trained: nn.Parameter) -> float:
    """`trained`: one to differentiate by; the embedding, unless that is frozen."""
    device = scorer.device
    prompts = [np.zeros(PROBE_TOKENS, np.int64)]
    rows = scorer.pack(prompts, [np.zeros(1, np.int64)])
    with torch.enable_grad():
        # Not `backward`: no parameter is to get a gradient of it. Kernels' workspaces are there from now on.
        torch.autograd.grad(scorer.token_logprobs(rows).sum(), trained)
        before = torch.cuda.memory_allocated(device)
        kept = scorer.token_logprobs(rows)
    used = torch.cuda.memory_allocated(device) - before
    del kept
    return used / rows.num_tokens
