import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.searcher.engines.sampling import sample, uniforms


def draw(logits, noise, temperature=1.0, greedy=False):
    rows = len(noise)
    tokens, logprobs = sample(
        torch.tensor(logits).expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), greedy),
        torch.tensor(noise, dtype=torch.float64),
    )
    return tokens.tolist(), logprobs.tolist()


def test_a_hand_computed_draw():
    logits = [float(np.log(p)) for p in (0.25, 0.5, 0.25)]
    tokens, logprobs = draw(logits, [0.0, 0.24, 0.26, 0.74, 0.76, 0.999999])
    assert tokens == [0, 0, 1, 1, 2, 2]
    assert logprobs[2] == pytest.approx(np.log(0.5))


def test_temperature_divides_the_logits():
    _, cold = draw([0.0, 1.0], [0.9], temperature=0.5)
    assert cold[0] == pytest.approx(2 - np.log(1 + np.e**2))


def test_a_token_without_mass_is_never_drawn():
    tokens, _ = draw([-float("inf"), 0.0, -float("inf")], [0.0, 0.5, 1 - 2**-53])
    assert tokens == [1, 1, 1]


def test_greedy_takes_the_largest_whatever_the_noise():
    assert draw([0.0, 3.0, 1.0], [0.0, 0.99], greedy=True)[0] == [1, 1]


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_uniforms_depend_on_seed_and_position_alone(seed, position):
    alone = uniforms(np.array([seed], np.uint64), np.array([position]))
    among = uniforms(np.array([1, seed, 2], np.uint64), np.array([9, position, position]))
    assert 0 <= alone[0] < 1 and alone[0] == among[1]


def test_uniforms_are_uniform_over_seeds_and_over_positions():
    n = 20000
    for seeds, positions in ((np.arange(n), np.zeros(n)), (np.full(n, 7), np.arange(n))):
        u = np.sort(uniforms(seeds.astype(np.uint64), positions.astype(np.uint64)))
        assert np.abs(u - (np.arange(n) + 0.5) / n).max() < 1.95 / np.sqrt(n)  # Kolmogorov-Smirnov, p = .001
    u = uniforms(np.full(n, 3, np.uint64), np.arange(n).astype(np.uint64))
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 4 / np.sqrt(n)
