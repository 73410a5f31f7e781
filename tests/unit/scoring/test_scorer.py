"""Log-probabilities of rows together equal those of each row alone, whatever layout serves the model."""

import numpy as np
import pytest
import torch
from support.scoring import gradients, grouped_rows, one_by_one, tiny
from transformers import LlamaForCausalLM

from tba.contracts.errors import UserError
from tba.scoring import Scorer

FAMILIES = {
    "llama": {},
    "tied": {"family": "llama", "tie_word_embeddings": True},
    "no grouped queries": {"family": "llama", "num_key_value_heads": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "sliding window": {"family": "mistral", "sliding_window": 4},
    "mixed windows": {"family": "gemma3_text", "head_dim": 8, "sliding_window": 4},
    "capped scores": {"family": "gemma2", "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "scaled logits": {"family": "granite", "logits_scaling": 8.0},
    "learned positions": {"family": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def model_of(name: str):
    settings = dict(FAMILIES[name])
    return tiny(settings.pop("family", name), **settings)


def scored(model, layout, weights) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Values and gradients of a weighted sum, in one layout."""
    scorer = Scorer(model, temperature=0.7)
    if layout is not None:
        scorer.layout = layout
    rows = scorer.pack(*grouped_rows())
    values = scorer.sequence_logprobs(rows)
    (values * weights).sum().backward()
    return values.detach(), gradients(model), rows.num_tokens


# No variable-length kernel caps scores: the scorer takes buckets for such a model.
@pytest.mark.parametrize(
    ("name", "layout"),
    [(n, layout) for n in FAMILIES for layout in ("buckets", "varlen") if (n, layout) != ("capped scores", "varlen")],
)
def test_values_and_gradients_together_equal_those_of_each_row_alone(name, layout):
    model = model_of(name).double()
    prompts, responses = grouped_rows()
    weights = torch.linspace(-1, 1, len(prompts), dtype=torch.float64)
    expected = one_by_one(model, prompts, responses, temperature=0.7)
    (expected * weights).sum().backward()
    wanted = gradients(model)
    values, got, num_tokens = scored(model, layout, weights)
    # Rotations and norms of transformers are float32 even here, and round differently by position in the batch.
    torch.testing.assert_close(values, expected.detach(), atol=1e-4, rtol=1e-6)
    largest = max(g.abs().max().item() for g in wanted.values())
    for parameter, grad in wanted.items():
        torch.testing.assert_close(got[parameter], grad, atol=1e-6 * max(1.0, largest), rtol=1e-5)
    assert num_tokens < sum(len(p) + len(r) - 1 for p, r in zip(prompts, responses, strict=True)), "prompts are shared"


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "attention interface"),
        ("mamba", {"state_size": 4}, "linear_attention|state"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "rope_scaling": None}, "s_aux"),
    ],
)
def test_model_that_cannot_be_packed_is_scored_padded_and_says_why(family, changes, reason):
    model = tiny(family, **changes)
    scorer = Scorer(model, temperature=1.0)
    assert scorer.layout == "padded" and not scorer.shares_prompts
    assert any(part in scorer.refused["buckets"] for part in reason.split("|"))
    prompts, responses = grouped_rows()
    rows = scorer.pack(prompts, responses)
    with torch.no_grad():
        alone = [scorer.sequence_logprobs(scorer.pack([p], [r])) for p, r in zip(prompts, responses, strict=True)]
        torch.testing.assert_close(scorer.sequence_logprobs(rows), torch.cat(alone), atol=2e-4, rtol=1e-4)


def test_layout_without_a_gpu_is_buckets_and_the_reason_is_kept():
    scorer = Scorer(tiny(), temperature=1.0)
    assert scorer.layout == "buckets" and scorer.refused == {"varlen": "device is cpu"}


def test_packed_model_refuses_a_plain_forward_pass_instead_of_mixing_rows():
    model = tiny()
    Scorer(model, temperature=1.0)
    with pytest.raises(Exception, match="keyword arguments"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_model_with_unknown_logit_transform_is_refused():
    class Odd(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 3.0
            return out

    with pytest.raises(UserError, match="transforms its logits"):
        Scorer(Odd(tiny().config).eval(), temperature=1.0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_half_precision_is_recognised_and_close_to_float32(family):
    model = tiny(family, head_dim=4)
    prompts, responses = grouped_rows()
    with torch.no_grad():
        exact = one_by_one(model, prompts, responses)
        scorer = Scorer(model.bfloat16(), temperature=1.0)
        assert scorer.layout == "buckets"
        values = scorer.sequence_logprobs(scorer.pack(prompts, responses))
    assert values.dtype == torch.float32
    assert ((values - exact).abs() / torch.tensor([len(r) for r in responses])).mean() < 0.2


def test_order_of_rows_changes_nothing_but_their_order():
    scorer = Scorer(tiny().double(), temperature=1.0)
    prompts, responses = grouped_rows()
    order = np.random.default_rng(1).permutation(len(prompts))
    with torch.no_grad():
        straight = scorer.sequence_logprobs(scorer.pack(prompts, responses))
        shuffled = scorer.sequence_logprobs(scorer.pack([prompts[i] for i in order], [responses[i] for i in order]))
    torch.testing.assert_close(shuffled, straight[torch.from_numpy(order)], atol=1e-6, rtol=0)


def test_a_model_that_was_packed_before_is_packed_again():
    model = tiny("llama")
    first = Scorer(model, temperature=1.0)
    assert Scorer(model, temperature=1.0).layout == first.layout == "buckets"
