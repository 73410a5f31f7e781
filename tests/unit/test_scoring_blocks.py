"""Rows of similar length go through the model together; which ones do changes no number."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import tba.scoring as scoring
from tba.scoring import BLOCK_PADDING_TOKENS, Scorer, pad_rows, split_by_length


def test_rows_of_very_different_length_are_not_padded_to_one():
    assert list(split_by_length([300, 10, 290, 10])) == [[0, 2], [1, 3]]
    assert list(split_by_length([20, 10, 30])) == [[2, 0, 1]], "little padding is cheaper than another pass"
    assert list(split_by_length([])) == []


@given(st.lists(st.integers(2, 3000), min_size=1, max_size=80))
def test_blocks_partition_the_rows_and_bound_the_padding(lengths):
    blocks = list(split_by_length(lengths))
    assert sorted(row for block in blocks for row in block) == list(range(len(lengths)))
    flat = [lengths[row] for block in blocks for row in block]
    assert flat == sorted(flat, reverse=True)
    for block in blocks:
        tokens = sum(lengths[row] for row in block)
        assert lengths[block[0]] * len(block) - tokens <= BLOCK_PADDING_TOKENS + tokens / 16


@given(st.integers(1, 60))
def test_equal_lengths_make_one_block(count):
    assert len(list(split_by_length([7] * count))) == 1


def pairs(seed: int, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 40, int(rng.integers(1, 6))) for _ in range(count)]
    return prompts, [rng.integers(0, 40, int(rng.integers(1, 30))) for _ in range(count)]


def test_layout_keeps_every_token_with_its_row():
    prompts, responses = pairs(0, 30)
    rows = pad_rows(prompts, responses, "cpu")
    for i, response in enumerate(responses):
        assert rows.target[rows.row == i].tolist() == response.tolist()
    predicted = torch.cat([b.input_ids[b.row, b.position + 1] for b in rows.blocks])
    assert predicted.tolist() == rows.target.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_the_same_in_one_block_and_in_many(monkeypatch, temperature):
    prompts, responses = pairs(1, 12)
    results = []
    for padding in (10**9, 0):
        monkeypatch.setattr(scoring, "BLOCK_PADDING_TOKENS", padding)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        model = LlamaForCausalLM(config).eval()
        rows = pad_rows(prompts, responses, "cpu")
        values = Scorer(model, temperature=temperature, compute_dtype=torch.float32).sequence_logprobs(rows)
        (values * torch.arange(1.0, 13.0)).sum().backward()
        results.append((len(rows.blocks), values.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (few, a, grads_a), (many, b, grads_b) = results
    assert few == 1 < many
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    for name, grad in grads_a.items():
        torch.testing.assert_close(grad, grads_b[name], atol=1e-4, rtol=1e-4)


def test_logits_that_fit_at_once_are_not_computed_twice(monkeypatch):
    prompts, responses = pairs(2, 4)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    scorer = Scorer(model, temperature=1.0, compute_dtype=torch.float32)
    rows = pad_rows(prompts, responses, "cpu")
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    for chunk_tokens, expected in ((10**6, 1), (10, 2 * -(-len(rows.target) // 10))):
        monkeypatch.setattr(scoring, "LOGIT_CHUNK_BYTES", 4 * 40 * chunk_tokens)
        calls.clear()
        scorer.sequence_logprobs(rows).sum().backward()
        assert len(calls) == expected
