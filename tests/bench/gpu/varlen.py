"""FlashAttention's variable-length call by torch's own kernel; on a CPU one document at a time, for rehearsals."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """(N, H, d), (E, G, d) twice -> (N, H, d); document i has queries cu_q[i:i+2] and keys cu_k[i:i+2].

    Causal with the last query at the last key. Raises: NotImplementedError for what TRL asks of other models only.
    """
    if not causal or window_size != (-1, -1):
        raise NotImplementedError(f"causal attention without a window only, got causal={causal}, {window_size}")
    if not q.is_cuda:
        return _one_by_one(q, k, v, cu_q.tolist(), cu_k.tolist(), softmax_scale)
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in known else {}
    return varlen_attn(  # pyright: ignore[reportReturnType]
        q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window_size=(-1, 0), **grouped
    )


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], scale: float | None) -> Tensor:
    parts = []
    for (q0, q1), (k0, k1) in zip(zip(cu_q, cu_q[1:], strict=False), zip(cu_k, cu_k[1:], strict=False), strict=True):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        query, key, value = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        out = scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
