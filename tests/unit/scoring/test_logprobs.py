"""The chunked log-probability and its hand-made gradient against autograd over all logits at once."""

import pytest
import torch

from tba.scoring.logprobs import Kernels, Transform, token_logprobs

TOKENS, PLACES, HIDDEN, VOCABULARY = 9, 7, 5, 11


def inputs(dtype=torch.float64, bias: bool = True):
    torch.manual_seed(0)
    hidden = torch.randn(PLACES, HIDDEN, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, dtype=dtype).requires_grad_() if bias else None
    source = torch.tensor([0, 0, 0, 1, 2, 5, 5, 6, 3])  # responses share the place that predicts their first token
    return hidden, weight, offset, source, torch.randint(0, VOCABULARY, (TOKENS,))


def plain(hidden, weight, bias, source, target, transform):
    logits = torch.nn.functional.linear(hidden[source], weight, bias) * transform.multiply
    if transform.cap is not None:
        logits = torch.tanh(logits / transform.cap) * transform.cap
    return (logits / transform.temperature).log_softmax(-1).gather(1, target[:, None])[:, 0]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize(
    "transform", [Transform(), Transform(temperature=0.7), Transform(2.0, None, 1.3), Transform(0.5, 3.0, 0.8)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_do_not_depend_on_the_chunk(chunk_tokens, transform, bias):
    args = inputs(bias=bias)
    leaves = [a for a in args[:3] if a is not None]
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    expected = plain(*args, transform)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    got = token_logprobs(*args, transform=transform, chunk_bytes=8 * VOCABULARY * chunk_tokens)
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(torch.autograd.grad((got * weights).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradient_of_a_near_certain_token_survives_half_precision():
    """softmax − 1 of bf16 numbers would be 0 here, and the last percent would never be learned."""
    hidden = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16).requires_grad_()
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    got = token_logprobs(hidden, weight, None, torch.tensor([0]), torch.tensor([0]))
    got.sum().backward()
    missing = 1 - torch.sigmoid(torch.tensor(8.0)).item()  # probability of the other token, 3.4e-4
    assert got.item() == pytest.approx(-missing, rel=1e-2)
    assert hidden.grad is not None
    assert hidden.grad[0].tolist() == pytest.approx([missing, -missing], rel=1e-2)


def test_logits_that_fit_at_once_are_not_computed_twice():
    calls = []

    def statistics(raw, target, transform):
        calls.append(len(raw))
        return Kernels().statistics(raw, target, transform)

    def slope(raw, target, logprob, transform):
        calls.append(raw.data_ptr())
        return Kernels().slope(raw, target, logprob, transform)

    seen = []
    for chunk_tokens in (100, 3):
        args = inputs()
        calls.clear()
        value = token_logprobs(*args, kernels=Kernels(statistics, slope), chunk_bytes=8 * VOCABULARY * chunk_tokens)
        saved = {t.data_ptr() for t in value.grad_fn.saved_tensors if t is not None}
        value.sum().backward()
        seen.append(calls[-1] in saved)
    assert seen == [True, False]


def test_frozen_head_gets_no_gradient_and_costs_none():
    hidden, weight, _, source, target = inputs()
    weight = weight.detach()
    token_logprobs(hidden, weight, None, source, target).sum().backward()
    assert weight.grad is None and hidden.grad is not None and hidden.grad.abs().sum() > 0


def test_half_precision_sums_over_chunks_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(400, 16, dtype=torch.bfloat16)
    weight = (torch.randn(30, 16) / 4).to(torch.bfloat16)
    target, source = torch.randint(0, 30, (400,)), torch.arange(400)
    grads = []
    for dtype, chunk in ((torch.float64, 10**9), (torch.bfloat16, 2 * 30 * 5)):
        w = weight.to(dtype).requires_grad_()
        token_logprobs(hidden.to(dtype), w, None, source, target, chunk_bytes=chunk).sum().backward()
        grads.append(w.grad.double())
    assert (grads[1] - grads[0]).norm() / grads[0].norm() < 5e-3
