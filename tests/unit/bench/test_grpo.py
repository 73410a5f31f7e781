"""The GRPO-type objective of arm 8, and the weights that it gets."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from bench.gpu.grpo import group_advantages, grpo
from hypothesis import given
from hypothesis import strategies as st
from support.learning import feed, live_config, make_learner, make_shard, run_config

from tba.contracts.errors import UserError
from tba.shards.batch import from_rows
from tba.trainer import learner

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
A0, A1 = [1.0, -1.0, -1.0, 1.0], [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
"""By hand: mean 1/2, deviation 1/2; mean 1/4, deviation sqrt(3)/4."""


def gradient(ratio, rewards=REWARDS, **more):
    """Of the loss by the policy's log-probabilities."""
    logprobs = torch.linspace(-30, -10, rewards.numel(), dtype=torch.float64).view(rewards.shape).requires_grad_()
    result = grpo(logprobs, torch.zeros_like(rewards), rewards, beta=0.05, weights=ratio, **more)
    result.loss.backward()
    return result, logprobs.grad


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_advantages_are_rewards_in_their_groups_standard_deviations():
    close(group_advantages(REWARDS, torch.ones_like(REWARDS, dtype=torch.bool)), [A0, A1])


def test_an_on_policy_step_is_reinforce_with_advantages_normalised_by_group():
    """-(1/(P K)) sum A grad log pi, whatever the ratio clip is."""
    for ratio in (None, torch.ones_like(REWARDS)):
        result, grad = gradient(ratio)
        close(grad, -torch.tensor([A0, A1], dtype=torch.float64) / 8)
        assert float(result.loss.detach()) == pytest.approx(0.0)


def test_the_clip_stops_what_has_gone_far_enough_and_nothing_else():
    """Up by more than .2 with A > 0, down by more than .2 with A < 0: no gradient. The other way: ratio times A."""
    ratio = torch.tensor([[1.3, 1.3, 0.7, 0.7], [1.1, 0.9, 0.5, 2.0]], dtype=torch.float64)
    result, grad = gradient(ratio)
    weak = 1 / math.sqrt(3)
    close(grad, [[0.0, 1.3 / 8, 0.0, -0.7 / 8], [-1.1 * math.sqrt(3) / 8, 0.9 * weak / 8, 0.0, 2.0 * weak / 8]])
    surrogate = 1.2 - 1.3 - 0.8 + 0.7 + 1.1 * math.sqrt(3) - weak * (0.9 + 0.8 + 2.0)
    assert float(result.loss.detach()) == pytest.approx(-surrogate / 8)


def test_a_group_of_equal_rewards_says_nothing():
    for reward in (0.0, 1.0, 0.1):
        _, grad = gradient(torch.full((1, 3), 1.5, dtype=torch.float64), torch.full((1, 3), reward).double())
        assert not grad.any()


def test_an_empty_slot_is_ignored_whatever_its_values_are():
    ratio = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0.0, math.nan]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64, requires_grad=True)
    result = grpo(logprobs, torch.zeros(1, 3), rewards, beta=0.1, weights=ratio)
    result.loss.backward()
    close(result.advantages, [[1.0, -1.0, 0.0]])
    close(logprobs.grad, [[-1 / 3, 1 / 3, 0.0]])


@given(st.lists(st.floats(-3, 3), min_size=8, max_size=8), st.floats(0.05, 0.9), st.integers(0, 999))
def test_it_is_the_clipped_surrogate_of_the_log_ratio(log_ratio, epsilon, seed):
    """Value and gradient of the textbook formula in float64."""
    drift = torch.tensor(log_ratio, dtype=torch.float64).view(2, 4)
    rewards = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    result, grad = gradient(drift.exp(), rewards, epsilon=epsilon)
    live = drift.clone().requires_grad_()
    a = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True)
    q = live.exp()
    loss = -torch.min(q * a, q.clamp(1 - epsilon, 1 + epsilon) * a).mean()
    loss.backward()
    close(grad, live.grad)
    assert float(result.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-12)


def test_what_only_trajectory_balance_has_is_refused():
    with pytest.raises(UserError, match="baselineShift"):
        gradient(None, baseline_shift=0.1)
    with pytest.raises(UserError, match="lossScale"):
        gradient(None, scale="paper")


def fed(batch):
    """Arm 8's learner, with its settings, that has these rows."""
    config = run_config(parameters={"ratioAlpha": 1.0, "ratioClip": 3.0})
    made = make_learner(config)
    feed(made, batch)
    return made


def test_the_trainers_weights_are_the_ratio_of_the_policy_to_the_sampler_cut_off_at_three(monkeypatch):
    monkeypatch.setattr(learner, "lookup", lambda _: grpo)
    batch = make_shard(0, samples=4)
    first = fed(batch)
    own = first.policy.reference_logprobs(first.packed(np.arange(len(batch)))).tolist()
    for factor, expected in ((1.5, 1.5), (0.5, 0.5), (20.0, 3.0)):
        told = []
        for i, row in enumerate(map(batch.row, range(len(batch)))):
            size = len(row.response_tokens)
            told.append(dataclasses.replace(row, sampler_logprobs=[(own[i] - math.log(factor)) / size] * size))
        result = fed(from_rows(batch.header, told)).train_step(live_config(), 1)
        np.testing.assert_allclose(result.weights, expected, rtol=1e-4)
        assert not result.log_z.any(), "trajectory balance would have estimated one"
