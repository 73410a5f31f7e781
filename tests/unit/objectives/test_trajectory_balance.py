"""P prompts, K responses; L = log-probability, ell = log-ratio to the reference, r = reward (tba_algorithm.md §8.3)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.contracts.errors import UserError
from tba.objectives import lookup
from tba.objectives.trajectory_balance import Loss, ratio_weights, trajectory_balance

BETA = 0.1
L_POLICY = [-10.0, -12.5, -9.0, -20.0]
L_REF = [-10.4, -12.0, -9.5, -19.0]
REWARDS = [1.0, 0.0, 1.0, 0.0]


def golden(scale: str = "reward") -> tuple[Loss, torch.Tensor]:
    policy = torch.tensor([L_POLICY], requires_grad=True)
    result = trajectory_balance(policy, torch.tensor([L_REF]), torch.tensor([REWARDS]), beta=BETA, scale=scale)
    result.loss.backward()
    return result, policy.grad


def batch(seed: int, num_prompts: int = 3, size: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy, ref, rewards = (torch.randn(num_prompts, size, generator=generator, dtype=torch.float64) for _ in range(3))
    return 20 * policy - 50, 20 * ref - 50, rewards


def gradient(policy: torch.Tensor, ref: torch.Tensor, rewards: torch.Tensor, **options: object) -> torch.Tensor:
    policy = policy.clone().requires_grad_()
    trajectory_balance(policy, ref, rewards, **{"beta": BETA, **options}).loss.backward()
    return policy.grad


def close(actual: torch.Tensor, expected: object, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), atol=tolerance, rtol=tolerance
    )


def test_golden_advantages_log_z_and_eq5_loss() -> None:
    result, _ = golden()
    close(result.advantages, [[0.445, -0.465, 0.435, -0.415]])
    close(result.log_z, [5.15])
    residuals = -result.advantages / BETA
    close(residuals, [[-4.45, 4.65, -4.35, 4.15]], 1e-5)
    close(residuals.double().square().mean(), 19.3925, 1e-5)
    close(result.advantages.double().square().mean(), 0.193925)


def test_golden_gradients_of_both_scales() -> None:
    close(golden("reward")[1], [[-0.11125, 0.11625, -0.10875, 0.10375]])
    close(golden("paper")[1], [[-2.225, 2.325, -2.175, 2.075]])


def test_golden_advantages_times_k_over_k_minus_1_are_leave_one_out() -> None:
    ell = torch.tensor(L_POLICY, dtype=torch.float64) - torch.tensor(L_REF, dtype=torch.float64)
    score = torch.tensor(REWARDS, dtype=torch.float64) - BETA * ell
    leave_one_out = score - (score.sum() - score) / 3
    close(golden()[0].advantages[0] * 4 / 3, leave_one_out)
    close(leave_one_out, [0.593333333, -0.62, 0.58, -0.553333333])


def test_mean_log_ratio_of_old_weights_would_not_sum_to_zero_but_ours_does() -> None:
    ell = torch.tensor(L_POLICY, dtype=torch.float64) - torch.tensor(L_REF, dtype=torch.float64)
    old = ell + torch.tensor([0.5, -0.3, 0.2, 0.1])
    r = torch.tensor(REWARDS, dtype=torch.float64)
    stale = -((r - r.mean()) - BETA * (ell - old.mean()))
    close(stale, [-0.4575, 0.4525, -0.4475, 0.4025])
    assert abs(float(stale.sum()) + 0.05) < 1e-6
    assert abs(float(golden()[0].advantages.double().sum())) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_gradient_equals_that_of_eq5_with_and_without_stop_gradient_on_log_z(seed: int) -> None:
    policy, ref, rewards = batch(seed)
    for stop in (True, False):
        live = policy.clone().requires_grad_()
        ell = live - ref
        log_z = (rewards / BETA - ell).mean(1, keepdim=True)
        ((log_z.detach() if stop else log_z) + ell - rewards / BETA).square().mean().backward()
        close(gradient(policy, ref, rewards, scale="paper"), live.grad, 1e-9)


@given(seed=st.integers(0, 10**6), beta=st.floats(0.001, 10), size=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_advantages_of_each_group_sum_to_zero(seed: int, beta: float, size: int) -> None:
    policy, ref, rewards = batch(seed, 4, size)
    weights = torch.rand(4, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    for w in (None, weights):
        result = trajectory_balance(policy, ref, rewards, beta=beta, weights=w)
        assert float(result.advantages.sum(1).abs().max()) < 1e-9 * (1 + 100 * beta)


@given(seed=st.integers(0, 10**6), shift=st.floats(-100, 100))
@settings(max_examples=30, deadline=None)
def test_constant_added_to_the_rewards_of_a_prompt_changes_nothing(seed: int, shift: float) -> None:
    policy, ref, rewards = batch(seed)
    moved = rewards.clone()
    moved[1] += shift
    close(gradient(policy, ref, moved), gradient(policy, ref, rewards), 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_groups_do_not_leak_into_each_other(seed: int) -> None:
    policy, ref, rewards = batch(seed)
    whole = gradient(policy, ref, rewards)
    for g in range(3):
        alone = gradient(policy[g : g + 1], ref[g : g + 1], rewards[g : g + 1])
        close(whole[g : g + 1], alone / 3, 1e-12)


def test_group_of_duplicates_has_no_gradient() -> None:
    policy, ref, rewards = (t[:, :1].expand(3, 6).contiguous() for t in batch(0))
    assert float(gradient(policy, ref, rewards).abs().max()) < 1e-14
    merged = torch.tensor([[6.0, 0, 0, 0, 0, 0]] * 3, dtype=torch.float64)
    assert float(gradient(policy, ref, rewards, weights=merged).abs().max()) < 1e-14


def test_equal_rewards_still_pull_towards_the_reference() -> None:
    policy, ref, _ = batch(1)
    grad = gradient(policy, ref, torch.ones_like(policy))
    assert float((grad * (policy - ref - (policy - ref).mean(1, keepdim=True))).sum()) > 0


@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(1, 4), min_size=2, max_size=5))
@settings(max_examples=50, deadline=None)
def test_multiplicities_equal_the_expanded_group(seed: int, counts: list[int]) -> None:
    size = sum(counts)
    policy, ref, rewards = batch(seed, 2, len(counts))
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expanded = gradient(policy[:, index], ref[:, index], rewards[:, index])  # (2, size)
    summed = torch.zeros(2, len(counts), dtype=torch.float64).index_add(1, index, expanded)

    def padded(t: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nn.functional.pad(t, (0, size - len(counts)), value=fill)

    weights = padded(torch.tensor([counts] * 2, dtype=torch.float64), 0.0)
    merged = gradient(padded(policy, math.nan), padded(ref, 0.0), padded(rewards, math.nan), weights=weights)
    close(merged[:, : len(counts)], summed, 1e-12)
    assert float(merged[:, len(counts) :].abs().sum()) == 0
    options = {"beta": BETA}
    a = trajectory_balance(policy[:, index], ref[:, index], rewards[:, index], **options)
    b = trajectory_balance(padded(policy, 0.0), padded(ref, 0.0), padded(rewards, 0.0), weights=weights, **options)
    close(a.log_z, b.log_z, 1e-12)
    close(a.loss, b.loss, 1e-12)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_agrees_with_a_naive_float64_reference_down_to_the_logits(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (2, 4, 6, 11)  # prompts, responses, tokens, vocabulary
    logits, ref_logits = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    tokens = torch.randint(11, shape[:3], generator=generator)
    rewards = torch.randint(2, shape[:2], generator=generator).double()

    def summed(x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x / temperature, -1).gather(-1, tokens[..., None]).squeeze(-1).sum(-1)

    live = logits.clone().requires_grad_()
    trajectory_balance(summed(live), summed(ref_logits), rewards, beta=0.3).loss.backward()
    expected = torch.zeros(shape, dtype=torch.float64)
    p = torch.softmax(logits / temperature, -1)
    for i in range(2):
        ell = [float(summed(logits)[i, j] - summed(ref_logits)[i, j]) for j in range(4)]
        for j in range(4):
            advantage = float(rewards[i, j] - rewards[i].mean()) - 0.3 * (ell[j] - sum(ell) / 4)
            for t in range(6):
                onehot = torch.nn.functional.one_hot(tokens[i, j, t], 11)
                expected[i, j, t] = -advantage / 8 * (onehot - p[i, j, t]) / temperature
    close(live.grad, expected, 1e-12)


def test_float32_log_probabilities_in_the_thousands_keep_their_differences() -> None:
    policy, ref, rewards = batch(5)
    coarse = trajectory_balance((policy - 5000).float(), (ref - 5000).float(), rewards.float(), beta=BETA)
    exact = trajectory_balance((policy - 5000).float().double(), (ref - 5000).float().double(), rewards, beta=BETA)
    close(coarse.advantages, exact.advantages, 1e-5)


def test_ratio_weights_are_clipped_powers_of_the_ratio_and_detached() -> None:
    policy = torch.tensor([[math.log(0.5), math.log(0.1), 900.0]], requires_grad=True)
    mu = torch.tensor([[math.log(0.125), math.log(0.4), 0.0]])
    weights = ratio_weights(policy, mu, alpha=0.5, clip=1.5)
    close(weights, [[1.5, 0.5, 1.5]])
    assert not weights.requires_grad
    close(ratio_weights(policy, mu, alpha=0.0, clip=1.0), [[1.0, 1.0, 1.0]])


def test_ratio_weights_stay_positive_for_a_group_that_the_policy_has_left_altogether() -> None:
    policy, mu = torch.full((1, 4), -900.0), torch.zeros(1, 4)
    weights = ratio_weights(policy, mu, alpha=1.0, clip=1.0)
    assert bool((weights > 0).all())
    trajectory_balance(policy, mu, torch.arange(4.0)[None], beta=BETA, weights=weights)


def test_uncentred_kl_needs_permission_and_does_not_sum_to_zero() -> None:
    arguments = batch(2)
    with pytest.raises(UserError, match="allow_biased=True"):
        trajectory_balance(*arguments, beta=BETA, center_kl=False)
    biased = trajectory_balance(*arguments, beta=BETA, center_kl=False, allow_biased=True)
    assert float(biased.advantages.sum(1).abs().min()) > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "beta must be .* > 0, got 0.0"),
        ({"beta": math.nan}, "beta must be"),
        ({"beta": math.inf}, "beta must be a finite number"),
        ({"weights": -torch.ones(3, 5)}, "weights must be finite and >= 0"),
        ({"weights": torch.zeros(3, 5)}, "positive sum in each group"),
        ({"weights": torch.full((3, 5), math.inf)}, "weights must be finite"),
        ({"weights": torch.ones(3, 4)}, "one shape"),
    ],
)
def test_refuses_bad_beta_and_weights(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trajectory_balance(*batch(0), **{"beta": BETA, **change})


def test_refuses_bad_shapes_and_rewards() -> None:
    policy, ref, rewards = batch(0)
    with pytest.raises(UserError, match="one shape"):
        trajectory_balance(policy, ref[:2], rewards, beta=BETA)
    with pytest.raises(UserError, match="one shape"):
        trajectory_balance(policy[0], ref[0], rewards[0], beta=BETA)
    with pytest.raises(UserError, match="K >= 2 responses, got K=1"):
        trajectory_balance(policy[:, :1], ref[:, :1], rewards[:, :1], beta=BETA)
    rewards[0, 0] = math.nan
    with pytest.raises(UserError, match="rewards must be finite where weight > 0"):
        trajectory_balance(policy, ref, rewards, beta=BETA)
    weights = torch.ones_like(rewards)
    weights[0, 0] = 0
    assert bool(trajectory_balance(policy, ref, rewards, beta=BETA, weights=weights).loss.isfinite())


def test_lookup_finds_an_objective_by_its_type_and_names_the_remedy_else() -> None:
    assert lookup("TrajectoryBalance") is trajectory_balance
    for name in ("Trajectory", "schedules", "os.path", ""):
        with pytest.raises(UserError, match="objective.type must name"):
            lookup(name)


def test_a_lowered_baseline_pulls_every_response_up_by_the_same_amount() -> None:
    policy, ref, rewards = batch(3)
    weights = torch.rand(policy.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    plain = gradient(policy, ref, rewards, weights=weights)
    lowered = gradient(policy, ref, rewards, weights=weights, baseline_shift=0.25)
    close(lowered, plain - 0.25 * weights / policy.numel())
