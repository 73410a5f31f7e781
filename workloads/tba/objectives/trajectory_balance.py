"""Trajectory balance with the partition function estimated per group (VarGrad). Source: arXiv 2503.18929, Eq. 5.

P prompts (groups), K responses a group. Log-probabilities are sums over response tokens, natural log.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tba.contracts.errors import UserError

Scale = Literal["reward", "paper"]
_LEAST_LOG_WEIGHT = -60.0  # 1e-26: no gradient to speak of, and far from float32's underflow


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """What one batch gives."""

    loss: torch.Tensor  # () differentiable through policy_logprobs alone
    advantages: torch.Tensor  # (P, K) detached, weight included; each group sums to its weights x baseline_shift
    log_z: torch.Tensor  # (P,) detached estimate of log Z = mean(r)/beta - mean(log-ratio)


def trajectory_balance(
    policy_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    rewards: torch.Tensor,
    *,
    beta: float,
    weights: torch.Tensor | None = None,
    baseline_shift: float = 0.0,
    scale: Scale = "reward",
    center_kl: bool = True,
    allow_biased: bool = False,
) -> Loss:
    """Squared log-ratio loss in advantage form: -(1/(P K)) sum A logpi, A = w [(r - r_mean) - beta (l - l_mean)].

    Inputs are (P, K); means are weighted with `weights` (>= 0, positive sum a group; 0 marks an empty slot, whose other
    values are ignored). Any positive weights keep the minimiser; integer multiplicities that sum to K equal the
    expanded group. `baseline_shift` (reward, >= 0; arXiv 2506.20520) lowers the baseline: every response is pulled up a
    little, which on the policy's own samples is nothing in the mean and on older ones holds it near their sampler.
    scale "paper" multiplies by 2/beta: the literal Eq. 5. `center_kl=False` drops l_mean, which moves the minimiser
    off-policy, and needs `allow_biased`.

    Raises: UserError for K < 2, unequal shapes, beta <= 0, and on a CPU for negative weights, an empty group, or a
    non-finite reward at positive weight.
    """
    _check(policy_logprobs, ref_logprobs, rewards, beta, weights)
    if not center_kl and not allow_biased:
        raise UserError(
            "center_kl=False changes what the policy converges to on off-policy data: "
            "keep center_kl=True, or pass allow_biased=True if that is wanted"
        )
    w = torch.ones_like(rewards) if weights is None else weights
    used = w > 0
    logprobs = torch.where(used, policy_logprobs, 0.0)
    # float64: log-probabilities of long responses are in the thousands, their differences matter at 1e-3.
    ratio = torch.where(used, policy_logprobs.detach().double() - ref_logprobs.double(), 0.0)  # (P, K)
    r = torch.where(used, rewards.double(), 0.0)
    w = w.double()
    r_mean, ratio_mean = _mean(r, w), _mean(ratio, w)  # (P, 1)
    advantages = w * ((r - r_mean + baseline_shift) - beta * (ratio - (ratio_mean if center_kl else 0.0)))
    factor = 2.0 / beta if scale == "paper" else 1.0
    loss = -(factor / rewards.numel()) * (advantages.to(logprobs.dtype) * logprobs).sum()
    return Loss(loss, advantages.to(logprobs.dtype), (r_mean / beta - ratio_mean).squeeze(1).to(logprobs.dtype))


def ratio_weights(
    policy_logprobs: torch.Tensor, mu_logprobs: torch.Tensor, *, alpha: float, clip: float
) -> torch.Tensor:
    """min(clip, (pi/mu)^alpha), detached, same shape: less weight to responses the policy has moved away from.

    mu is the probability under the weights that sampled the response, as its engine told it: so the weight knows how
    far the policy had gone when the row came. An engine's rounding makes weights uneven, no more: any positive ones
    keep the minimiser. Source: system.md §5; docs/decisions/0029-ratio-to-the-sampler.md.
    """
    log_weight = alpha * (policy_logprobs.detach() - mu_logprobs.detach())
    # Clip in log space: exp of a large ratio would be inf before a clip after it. From below too: weights must stay
    # positive, and a group that the policy has left altogether would otherwise have none.
    return log_weight.clamp(min=_LEAST_LOG_WEIGHT, max=math.log(clip)).exp()


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)


def _check(
    policy: torch.Tensor, ref: torch.Tensor, rewards: torch.Tensor, beta: float, weights: torch.Tensor | None
) -> None:
    shapes = {tuple(t.shape) for t in (policy, ref, rewards) + (() if weights is None else (weights,))}
    if len(shapes) != 1 or policy.dim() != 2:
        raise UserError(f"trajectory_balance needs tensors of one shape (P, K), got {sorted(shapes)}: group by prompt")
    if policy.shape[1] < 2:
        raise UserError(f"a group needs K >= 2 responses, got K={policy.shape[1]}: raise responsesPerPrompt")
    if not (math.isfinite(beta) and beta > 0):
        raise UserError(f"beta must be a finite number > 0, got {beta}")
    if policy.is_cuda:  # to look at values would wait for the GPU; the trainer takes them from checked host arrays
        return
    if weights is not None and not bool(((weights >= 0) & weights.isfinite()).all() & (weights.sum(1) > 0).all()):
        raise UserError("weights must be finite and >= 0 with a positive sum in each group: drop empty groups")
    used = rewards if weights is None else rewards[weights > 0]
    if not bool(used.isfinite().all()):
        raise UserError("rewards must be finite where weight > 0: a failed response has no reward, give it weight 0")
