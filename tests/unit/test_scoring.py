"""Token log-probabilities against a plain transformers forward pass."""

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import tba.scoring as scoring
from tba.contracts.errors import UserError
from tba.scoring import Scorer, pad_rows

PROMPTS = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]
RESPONSES = [np.array([7, 8]), np.array([9, 10, 11, 12]), np.array([13])]


def tiny_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def naive(model, temperature: float) -> torch.Tensor:
    """float64, one row at a time, no padding: what the kernel must equal."""
    sums = []
    double = model.double()
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]))[None]
        logprobs = (double(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        sums.append(sum(logprobs[len(prompt) - 1 + i, t] for i, t in enumerate(response)))
    return torch.stack(sums)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_padding_does_not_change_a_log_probability(temperature):
    model = tiny_model()
    scorer = Scorer(model, temperature=temperature, compute_dtype=torch.float32)
    got = scorer.sequence_logprobs(pad_rows(PROMPTS, RESPONSES, "cpu"))
    np.testing.assert_allclose(got.detach(), naive(tiny_model(), temperature).detach(), atol=1e-5)


def test_chunking_over_tokens_changes_neither_value_nor_gradient(monkeypatch):
    grads = []
    for chunk_bytes in (10**9, 4 * 40 * 2):
        monkeypatch.setattr(scoring, "LOGIT_CHUNK_BYTES", chunk_bytes)
        model = tiny_model()
        scorer = Scorer(model, temperature=1.0, compute_dtype=torch.float32)
        value = scorer.sequence_logprobs(pad_rows(PROMPTS, RESPONSES, "cpu")).sum()
        value.backward()
        grads.append((value.item(), {n: p.grad for n, p in model.named_parameters()}))
    assert grads[0][0] == pytest.approx(grads[1][0], abs=1e-5)
    for name, grad in grads[0][1].items():
        torch.testing.assert_close(grad, grads[1][1][name], atol=1e-6, rtol=1e-5)


def test_tied_embeddings_get_the_gradient_of_both_uses():
    model = tiny_model(tie_word_embeddings=True)
    Scorer(model, temperature=1.0, compute_dtype=torch.float32).sequence_logprobs(
        pad_rows(PROMPTS, RESPONSES, "cpu")
    ).sum().backward()
    got = model.get_input_embeddings().weight.grad
    reference = tiny_model(tie_word_embeddings=True)
    naive(reference, 1.0).sum().backward()
    np.testing.assert_allclose(got, reference.get_input_embeddings().weight.grad, atol=1e-4)


def test_model_with_unknown_logit_transform_is_refused():
    class Odd(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 3.0 + 1.0
            return out

    model = Odd(tiny_model().config).eval()
    with pytest.raises(UserError, match="transforms its logits"):
        Scorer(model, temperature=1.0, compute_dtype=torch.float32)


def test_logits_capped_in_bfloat16_are_recognised():
    config = Gemma2Config(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, initializer_range=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    scorer = Scorer(Gemma2ForCausalLM(config).eval(), temperature=1.0, compute_dtype=torch.bfloat16)
    assert scorer.compute_dtype == torch.bfloat16


def test_empty_response_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        pad_rows([np.array([1])], [np.array([], dtype=np.int64)], "cpu")
