"""Tiny models of several families and rows to score with them, one row at a time for comparison."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 40
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tiny(family: str = "llama", **changes):
    """Random weights, the same for each call, large enough that attention matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SHAPE, "initializer_range": 0.3, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def grouped_rows(seed: int = 0, prompts: int = 3, rows: int = 11) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows that share prompts of 1..8 tokens, out of order, and one of its own; responses of 1..11 tokens."""
    rng = np.random.default_rng(seed)
    known = [rng.integers(0, VOCABULARY, int(rng.integers(1, 9))) for _ in range(prompts)]
    chosen = [known[i % prompts] for i in range(rows)] + [rng.integers(0, VOCABULARY, 4)]
    return chosen, [rng.integers(0, VOCABULARY, int(rng.integers(1, 12))) for _ in chosen]


def one_by_one(
    model, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float = 1.0
) -> Tensor:
    """Sums of log-probabilities by plain forward passes of single rows with plain attention: what others must equal."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    sums = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]))[None]
        logprobs = (model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
        sums.append(sum(logprobs[len(prompt) - 1 + i, t] for i, t in enumerate(response)))
    model.set_attn_implementation(before)
    return torch.stack(sums)


def gradients(model) -> dict[str, Tensor]:
    """Of all parameters that have one; then none has."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
