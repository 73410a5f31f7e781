"""How decoder layers are computed again in the backward pass, for less memory: not at all, their cheap parts, whole."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from tba.contracts.errors import UserError

Recomputation = Literal["none", "selective", "full"]
"""Of a decoder layer in the backward pass: nothing, all but its expensive results, all."""
_AGAIN: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""Of every checkpoint. No dropout anywhere: random states need not be kept."""
_EXPENSIVE = (
    "aten.mm",
    "aten.addmm",
    "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "torch_attn._varlen_attn",
)
"""Operators whose results selective recomputation keeps. Not batched products: plain attention makes its length by
length scores with them, which are what it must not keep."""


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The decoder layers, of models whose layers transformers could recompute."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def set_recomputation(model: nn.Module, wanted: Recomputation) -> None:
    """Compute each decoder layer again in the backward pass: not at all, but for what is expensive, or whole.

    Not by transformers' own switch, which is read in training mode only: some families' layers drop out then.
    Inside the layer's call, not around it: FSDP's hooks gather a different number of times in the backward pass.

    Raises: UserError if the model has no layers that transformers could recompute.
    """
    layers = layers_of(model)
    for layer in layers:
        for module in layer.modules():
            if getattr(module.__dict__.get("forward"), "func", None) in (checkpoint, _gated):
                del module.forward
    if wanted == "none":
        return
    if not layers:
        raise UserError(
            f"trainer.activationCheckpointing: {type(model).__name__} has no layers that can be recomputed: set Never"
        )
    # Capped scores are made by batched products, length by length: parts would keep them.
    capped = getattr(getattr(model, "config", None), "attn_logit_softcapping", None) is not None
    for layer in layers:
        if wanted == "full":
            layer.forward = partial(checkpoint, layer.forward, **_AGAIN)
        elif capped or not is_gated_mlp(getattr(layer, "mlp", None)):
            _recompute_by_operator(layer)
        else:
            mlp: Any = layer.mlp
            mlp.forward = partial(_gated, mlp)


def is_gated_mlp(module: object) -> bool:
    """Whether it computes down(act(gate(x)) * up(x)) and nothing else, whatever class it is of.

    Its own `forward` is asked, on small numbers with other functions in the place of its parts.
    """
    if not isinstance(module, nn.Module) or type(getattr(module, "down_proj", None)) is not nn.Linear:
        return False
    parts = SimpleNamespace(gate_proj=torch.sin, up_proj=torch.cos, act_fn=torch.exp, down_proj=torch.atan)
    if {name for name, _ in module.named_children()} != set(vars(parts)):
        return False
    x = torch.linspace(-1, 1, 8)
    try:
        return torch.equal(type(module).forward(parts, x), _product(parts, x.sin(), x.cos()))
    except (AttributeError, TypeError):  # needs more than these
        return False


def _gated(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """The network of a layer, its product in a checkpoint, for half of what it keeps. `x`: float [..., hidden].

    A checkpoint stops before the last operator that keeps something: that is the projection down, which so is not
    repeated. By operator would save more in general, for Python in each of them: half of a narrow layer's time.
    """
    kept: torch.Tensor = checkpoint(_product, mlp, mlp.gate_proj(x), mlp.up_proj(x), **_AGAIN)
    return kept


def _product(mlp: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    down: Callable[[torch.Tensor], torch.Tensor] = mlp.down_proj
    return down(mlp.act_fn(gate) * up)


def _recompute_by_operator(layer: nn.Module) -> None:
    contexts = partial(create_selective_checkpoint_contexts, _expensive_operators())
    layer.forward = partial(checkpoint, layer.forward, context_fn=contexts, **_AGAIN)


def _expensive_operators() -> list[Any]:
    """Those of `_EXPENSIVE` that this torch has, with all their overloads."""
    packets = (getattr(getattr(torch.ops, ns), op, None) for ns, op in (name.split(".") for name in _EXPENSIVE))
    return [getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()]
