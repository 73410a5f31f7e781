"""Attention within the documents of a packed sequence, plugged into transformers' attention interface.

Letters: N tokens, E key places, H query heads, G key/value heads, d head size; `Packing` says which key is whose.
Kernels are torch's own: `varlen_attn` (FlashAttention) for half precision on a GPU, SDPA over buckets elsewhere.
"""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tba.scoring.layout import Bucket, Packing

varlen_attn: Any = None
if torch.cuda.is_available():  # elsewhere it cannot serve, and its import writes a warning to the terminal
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

NAME = "tba_packed"
"""Of this implementation, in a model's configuration."""
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_FLASH_CAPABILITY = (8, 0)
_FLASH_MAX_HEAD = 256
_ARGUMENTS = frozenset(inspect.signature(varlen_attn).parameters if varlen_attn is not None else ())
"""Of `varlen_attn`, which differ between releases of torch."""


class Unpackable(Exception):
    """The model asks its attention for something that packing does not do."""


def use_packed_attention(model: nn.Module) -> None:
    """Make every attention layer of a transformers model call `packed_attention`. Raises: Unpackable."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - _KNOWN_LAYERS:
        raise Unpackable(f"has layers of kind {sorted(kinds - _KNOWN_LAYERS)}")
    settable = getattr(model, "_can_set_attn_implementation", None)
    if settable is None or not settable():
        raise Unpackable("does not follow transformers' attention interface")
    if getattr(model, "_is_stateful", False):
        raise Unpackable("carries a state from token to token")
    AttentionInterface.register(NAME, packed_attention)
    set_attention(model, NAME)
    if attention_of(model) != NAME:
        raise Unpackable("keeps its own attention implementation")


def attention_of(model: nn.Module) -> str:
    """Name of the attention implementation that a transformers model uses."""
    config: Any = model.config
    return config.get_text_config(decoder=True)._attn_implementation


def set_attention(model: nn.Module, name: str) -> None:
    """Change it, where the model lets one."""
    if attention_of(model) != name:
        model.set_attn_implementation(name)  # type: ignore[operator]


def flash_reason(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why `varlen_attn` cannot serve; None if it can."""
    if device.type != "cuda":
        return f"device is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype is {dtype}"
    if torch.cuda.get_device_capability(device) < _FLASH_CAPABILITY:
        return "compute capability is below 8.0"
    if head_size > _FLASH_MAX_HEAD or head_size % 8:
        return f"head size is {head_size}"
    return None if {"window_size", "scale"} <= _ARGUMENTS else "this torch has no varlen_attn with a window"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """(1, H, N, d), (1, G, N, d) twice -> (1, N, H, d). The signature is transformers'.

    Raises: Unpackable for sinks, biases, dropout, masks or attention that is not causal.
    """
    if packing is None:
        raise Unpackable("does not hand keyword arguments on to its attention layers")
    asked = [name for name in ("s_aux", "position_bias", "head_mask", "cache") if others.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if asked or dropout > 0.0 or others.get("is_causal") is False:
        raise Unpackable(f"asks its attention for {asked or 'dropout or bidirectional attention'}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    q, k = q.to(v.dtype), k.to(v.dtype)
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    window = sliding_window if sliding_window and 0 < sliding_window < packing.max_keys else None
    if packing.buckets:
        return _bucketed(q, k, v, packing, scale, window, softcap)[None], None
    if softcap is not None or q.shape[-1] != v.shape[-1]:
        raise Unpackable("caps its scores or has value heads of another size: no variable-length kernel does that")
    return _varlen(q, k, v, packing, scale, window)[None], None


# -- variable-length kernel


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    if packing.shared:
        k, v = _take_shared(k, packing.keys), _take_shared(v, packing.keys)  # (E, G, d)
    if not q.is_cuda:
        return _varlen_loop(q, k, v, packing, scale, window)
    # Where queries are fewer than keys, FlashAttention aligns the causal triangle with the last key: just so.
    sides = (-1, 0) if window is None else (window - 1, 0)
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _ARGUMENTS else {}
    return varlen_attn(
        q,
        k,
        v,
        packing.cu_queries,
        packing.cu_keys,
        packing.max_queries,
        packing.max_keys,
        scale=scale,
        window_size=sides,
        **grouped,
    )


def _varlen_loop(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    """The same by one document at a time: what the kernel must equal, on any device."""
    outputs = []
    bounds = zip(packing.cu_queries.tolist(), packing.cu_keys.tolist(), strict=True)
    (start, key_start), *ends = bounds
    for end, key_end in ends:
        bucket = Bucket(1, end - start, key_end - key_start, torch.tensor([key_end - key_start - end + start]), False)
        outputs.append(
            _one_bucket(q[start:end], k[key_start:key_end], v[key_start:key_end], bucket, scale, window, None)
        )
        start, key_start = end, key_end
    return torch.cat(outputs)


class _TakeShared(torch.autograd.Function):
    """index_select whose gradient is summed in float32: many responses add to one prompt's keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,), (grad,) = ctx.saved_tensors, grads
        total = torch.zeros((ctx.size, *grad.shape[1:]), dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def _take_shared(x: Tensor, index: Tensor) -> Tensor:
    if x.dtype in (torch.bfloat16, torch.float16):
        return _TakeShared.apply(x, index)  # type: ignore[return-value]
    return x.index_select(0, index)


# -- buckets


class _Spread(torch.autograd.Function):
    """Tokens to padded places; a token has one place, so that the gradient is a selection too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """The way back: padded places to tokens. The gradient of padding is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, tokens: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, padding)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, padding = ctx.saved_tensors
        return grads[0].index_select(0, tokens).index_fill_(0, padding, 0.0), None, None, None


def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    assert packing.queries is not None and packing.places is not None and packing.padding is not None
    q = _Spread.apply(q, packing.queries, packing.places)  # type: ignore[assignment]
    if packing.shared:
        k, v = _take_shared(k, packing.keys), _take_shared(v, packing.keys)
    else:  # keys lie as queries do
        k = _Spread.apply(k, packing.keys, packing.places)  # type: ignore[assignment]
        v = _Spread.apply(v, packing.keys, packing.places)  # type: ignore[assignment]
    outputs = []
    place = key_place = 0
    for bucket in packing.buckets:
        end, key_end = place + bucket.num * bucket.queries, key_place + bucket.num * bucket.keys
        outputs.append(
            _one_bucket(q[place:end], k[key_place:key_end], v[key_place:key_end], bucket, scale, window, softcap)
        )
        place, key_place = end, key_end
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Gather.apply(flat, packing.places, packing.queries, packing.padding)  # type: ignore[return-value]


def _one_bucket(
    q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """(b x queries, H, d), (b x keys, G, d) twice -> (b x queries, H, d)."""
    q, k, v = (x.unflatten(0, (bucket.num, -1)).transpose(1, 2) for x in (q, k, v))  # (b, heads, length, d)
    if softcap is None:
        mask = None if bucket.aligned and window is None else _mask(bucket, window, q)
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap + _mask(bucket, window, q)
        out = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype) @ v
    return out.transpose(1, 2).flatten(0, 1)


def _mask(bucket: Bucket, window: int | None, like: Tensor) -> Tensor:
    """(b, 1, queries, keys) to add to the scores: 0, or -inf where a key is not seen."""
    made = bucket.masks.get((window, like.dtype))
    if made is not None:
        return made
    query = bucket.offset[:, None, None] + torch.arange(bucket.queries, device=like.device)[:, None]
    key = torch.arange(bucket.keys, device=like.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)[:, None]
    bucket.masks[window, like.dtype] = mask
    return mask
