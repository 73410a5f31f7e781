"""Floating-point operations of a dense decoder, and what a GPU could do: model FLOPs utilisation (MFU).

A multiply-add counts 2. A forward pass over a token costs 2 a parameter of the layers' matrices (no embedding table: a
look-up; no norms), for each layer 4·h·d_h a position that it attends to (scores and mix of values; causal, itself
included), and 2 a parameter of the output head where logits are made. Backward costs twice the forward pass.
Recomputation (activation checkpointing, a second pass over a large group) counts nothing: it is no progress.
Source: PaLM (arXiv 2204.02311) appendix B, with the causal half and the logits of responses alone; the count by
matrices is that of Chinchilla (arXiv 2203.15556) appendix F without its softmax and embedding terms.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TABLES = re.compile(r"embed|\bwte\b|\bwpe\b|lm_head|lora_")
"""Names of matrices that are looked up, counted apart (the head) or not the model's own."""
_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "is_encoder_decoder")
_NOT_TEXT = ("vision_config", "audio_config")

# (pattern of the driver's name, dense bf16 tensor TFLOP/s of the vendor's data sheet), first match wins. Where a sheet
# gives the figure "with sparsity", half of it.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"GH200", 990.0),
    (r"H200 NVL", 835.5),
    (r"H200", 989.5),
    (r"H100 NVL", 835.5),
    (r"H100 PCIe", 756.5),
    (r"H100", 989.5),
    (r"H800 PCIe", 756.5),
    (r"H800", 989.5),
    (r"H20", 148.0),
    (r"A100|A800", 312.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"L40S", 362.0),
    (r"L40", 181.0),
    (r"L4", 121.0),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a token depends on."""

    matrix_parameters: int
    """Of all layers together."""
    head_parameters: int
    """Hidden size x vocabulary."""
    attention_width: int
    """Query heads x size of a head."""
    windows: tuple[int | None, ...]
    """One a layer: positions that a token attends to at most, itself included; None: all before it."""

    def forward(self, length: int, num_logits: int) -> float:
        """FLOPs of a forward pass over one sequence."""
        attended = sum(_attended(length, window) for window in self.windows)
        dense = 2.0 * self.matrix_parameters * length + 2.0 * self.head_parameters * num_logits
        return dense + 4.0 * self.attention_width * attended

    def generate(self, prompt: int, response: int) -> float:
        """FLOPs of a response, its prompt's keys and values given. The token sampled last is not fed in again."""
        fed = prompt + max(response - 1, 0)
        return self.forward(fed, response) - self.forward(prompt, 0)


def model_shape(config: Mapping[str, Any], tensors: Iterable[tuple[str, Sequence[int]]]) -> ModelShape | None:
    """Of a model's config.json and its tensors' names and shapes; None for anything but a dense decoder of text."""
    whole, config = config, config.get("text_config") or config
    if any(config.get(name) for name in _NOT_DENSE) or any(whole.get(name) for name in _NOT_TEXT):
        return None
    hidden, layers, heads = (
        _first(config, *names)
        for names in (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
    )
    vocabulary = _first(config, "vocab_size")
    windows = _windows(config, layers)
    matrices = sum(_product(shape) for name, shape in tensors if len(shape) >= 2 and not _TABLES.search(name))
    if not (hidden and heads and vocabulary and windows and matrices):
        return None
    width = heads * (_first(config, "head_dim") or hidden // heads)
    return ModelShape(matrices, hidden * vocabulary, width, windows)


def peak_flops(gpu: str | None, dtype: str, num_gpus: int = 1) -> float | None:
    """Peak FLOP/s of `num_gpus` GPUs of a model in `dtype`; None if it is not known."""
    if gpu is None or dtype != "bfloat16":
        return None
    for pattern, tera in _PEAKS:
        if re.search(rf"\b(?:{pattern})(?![0-9A-Z])", gpu) and "MIG" not in gpu:
            return tera * 1e12 * num_gpus
    return None


def utilisation(flops: float, seconds: float, peak: float | None) -> float | None:
    """MFU in 0..1; None where work, time or peak are unknown."""
    return flops / seconds / peak if peak and seconds > 0 and flops > 0 else None


def _attended(length: int, window: int | None) -> int:
    """Sum over the positions 1..length of how many each attends to."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _windows(config: Mapping[str, Any], layers: int | None) -> tuple[int | None, ...]:
    """Empty if there are layers of another kind than attention."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        used = window if config.get("use_sliding_window", True) else None
        return (used,) * (layers or 0)
    of_kind = {"full_attention": None, "sliding_attention": window}
    return tuple(of_kind[k] for k in kinds) if all(k in of_kind for k in kinds) else ()


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int)), None)


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
