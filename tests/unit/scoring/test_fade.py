"""The push on an improbable token of a bad response fades; every other gradient stays as it is."""

import math

import pytest
import torch

from tba.scoring.fade import fade

PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 1e-30]


def pushed(direction: float, floor: float) -> list[float]:
    logprobs = torch.tensor(PROBABILITIES).log().requires_grad_()
    values = fade(logprobs, floor)
    assert torch.equal(values, logprobs)
    (direction * values).sum().backward()
    return logprobs.grad.tolist()


def test_pushing_down_fades_in_proportion_below_the_floor():
    assert pushed(2.0, 0.2) == pytest.approx([2.0, 2.0, 2.0, 0.5, 0.0], abs=1e-6)


def test_pulling_up_is_never_changed():
    assert pushed(-2.0, 0.2) == [-2.0] * 5


def test_without_a_floor_nothing_is():
    assert pushed(2.0, 0.0) == [2.0] * 5


def test_the_gradient_below_the_floor_is_that_of_the_probability_over_the_floor():
    logprob = torch.tensor([math.log(0.05)], dtype=torch.float64).requires_grad_()
    (wanted,) = torch.autograd.grad((logprob.exp() / 0.2).sum(), logprob)
    (got,) = torch.autograd.grad(fade(logprob, 0.2).sum(), logprob)
    torch.testing.assert_close(got, wanted)
