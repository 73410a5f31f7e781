"""A tabular policy trained off-policy must reach pi_ref exp(r / beta) / Z from any full-support sampler.

16 actions, 4 prompts, beta .5, K 8, mu_min >= .005, 10k steps, 3 seeds. All samplers, seeds and prompts run side by
side as groups of one batch, which they may because groups do not leak into each other. G groups, Y actions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from tba.objectives.trajectory_balance import ratio_weights, trajectory_balance

ACTIONS, PROMPTS, SEEDS, SIZE, STEPS = 16, 4, 3, 8, 10_000
BETA, MU_MIN, STALE_STEPS, LEARNING_RATE = 0.5, 0.005, 50, 1.0
CENTRED = ("uniform", "stale", "adversarial", "deduplicated", "reward_softmax", "weighted", "missing_support")
UNCENTRED = ("uncentred",)
GROUPS = SEEDS * PROMPTS  # of one sampler


def world() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log reference, rewards, target), each (GROUPS, Y)."""
    parts = []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        log_ref = torch.log_softmax(torch.randn(PROMPTS, ACTIONS, generator=generator), -1)
        rewards = torch.randint(2, (PROMPTS, ACTIONS), generator=generator).float()
        rewards += 0.3 * torch.randn(PROMPTS, ACTIONS, generator=generator)
        parts.append((log_ref, rewards, torch.softmax(log_ref + rewards / BETA, -1)))
    log_ref, rewards, target = (torch.cat(p) for p in zip(*parts, strict=True))
    return log_ref, rewards, target


def behaviour(kind: str, stale: torch.Tensor, rewards: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mu (GROUPS, Y); every action has at least MU_MIN unless support is missing."""
    uniform = torch.full_like(target, 1 / ACTIONS)
    if kind in ("stale", "weighted"):
        return MU_MIN + (1 - ACTIONS * MU_MIN) * torch.softmax(stale, -1)
    if kind == "adversarial":  # what the target likes is drawn as rarely as allowed
        good = target > target.median(1, keepdim=True).values
        return torch.where(good, MU_MIN, (1 - good.sum(1, keepdim=True) * MU_MIN) / (~good).sum(1, keepdim=True))
    if kind == "reward_softmax":
        return torch.softmax(rewards, -1)
    if kind == "missing_support":
        return torch.where(torch.arange(ACTIONS) < 12, 1 / 12, 0.0).expand_as(target)
    return uniform


def draw(kind: str, mu: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    replacement = kind != "reward_softmax"  # as the replay branch draws
    return torch.multinomial(mu, SIZE, replacement, generator=generator)


def group_weights(kind: str, actions: torch.Tensor, logprobs: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """(GROUPS, K)"""
    if kind == "deduplicated":  # each distinct action once
        equal = actions[:, :, None] == actions[:, None, :]
        return (equal.int().argmax(2) == torch.arange(SIZE)).float()
    if kind == "weighted":
        return ratio_weights(logprobs, mu.gather(1, actions).log(), alpha=1.0, clip=1.0)
    return torch.ones(actions.shape)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a few hundred numbers: threads only wait for each other, ten times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def distances(kinds: tuple[str, ...]) -> dict[str, float]:
    """Largest total variation to the target over prompts and seeds, by sampler, after training."""
    with one_thread():
        return train(kinds)


def train(kinds: tuple[str, ...]) -> dict[str, float]:
    log_ref, rewards, target = world()
    generator = torch.Generator().manual_seed(17)
    logits = log_ref.repeat(len(kinds), 1).requires_grad_()  # (G, Y)
    all_ref, all_rewards = log_ref.repeat(len(kinds), 1), rewards.repeat(len(kinds), 1)
    parts = [slice(i * GROUPS, (i + 1) * GROUPS) for i in range(len(kinds))]
    fixed = {k: behaviour(k, log_ref, rewards, target) for k in kinds}
    for step in range(STEPS):
        if step % STALE_STEPS == 0:
            for kind, part in zip(kinds, parts, strict=True):
                if kind in ("stale", "weighted"):
                    fixed[kind] = behaviour(kind, logits.detach()[part], rewards, target)
        actions = torch.cat([draw(k, fixed[k], generator) for k in kinds])  # (G, K)
        logprobs = torch.log_softmax(logits, -1).gather(1, actions)
        weights = torch.cat(
            [group_weights(k, actions[p], logprobs.detach()[p], fixed[k]) for k, p in zip(kinds, parts, strict=True)]
        )
        biased = kinds == UNCENTRED
        result = trajectory_balance(
            logprobs, all_ref.gather(1, actions), all_rewards.gather(1, actions), beta=BETA, weights=weights,
            center_kl=not biased, allow_biased=biased,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(result.loss * len(logits), logits)  # each group as if it were alone
        with torch.no_grad():
            logits -= (0.2 if biased else LEARNING_RATE) * gradient
    policy = torch.softmax(logits.detach(), -1)
    variation = 0.5 * (policy - target.repeat(len(kinds), 1)).abs().sum(1)
    return {k: float(variation[p].max()) for k, p in zip(kinds, parts, strict=True)}


def test_every_sampler_but_the_crippled_one_keeps_its_promise_of_full_support() -> None:
    log_ref, rewards, target = world()
    for kind in CENTRED:
        mu = behaviour(kind, log_ref, rewards, target)
        torch.testing.assert_close(mu.sum(1), torch.ones(GROUPS))
        assert (float(mu.min()) >= MU_MIN - 1e-7) == (kind != "missing_support"), kind


@pytest.mark.parametrize("kind", [k for k in CENTRED if k != "missing_support"])
def test_policy_reaches_the_tilted_reference_from(kind: str) -> None:
    assert distances(CENTRED)[kind] <= 0.005


def test_policy_does_not_reach_it_where_actions_are_never_sampled() -> None:
    assert distances(CENTRED)["missing_support"] > 0.05


def test_policy_does_not_reach_it_with_an_uncentred_kl() -> None:
    assert distances(UNCENTRED)["uncentred"] > 0.05
