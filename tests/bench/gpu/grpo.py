"""A GRPO-type objective for arm 8: clipped ratio to the sampler, advantages normalised by group, no KL term.

P prompts (groups), K responses a group. As our trainer gives log-probabilities by response, the ratio is of whole
responses (arXiv 2507.18071 without its root of the length), and there is no division by length (arXiv 2503.20783).
"""

import torch
from torch import Tensor

from tba.contracts.errors import UserError
from tba.objectives.trajectory_balance import Loss

EPSILON = 0.2
_LEAST_STD = 1e-6
"""Below it all rewards of a group are the same, and it says nothing."""


def grpo(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    *,
    beta: float,
    weights: Tensor | None = None,
    baseline_shift: float = 0.0,
    scale: str = "reward",
    epsilon: float = EPSILON,
) -> Loss:
    """-(1/(P K)) sum min(q A, clip(q, 1 - epsilon, 1 + epsilon) A), A = (r - mean r) / std r over the group.

    Inputs are (P, K). `weights`: the ratio q = pi/mu of each response, detached, 1 if None; 0 marks an empty slot,
    whose other values are ignored. `ref_logprobs` and `beta` have no part in it: they come with every objective's call.

    Raises: UserError for a baseline shift or another scale, which this objective does not have.
    """
    if baseline_shift or scale != "reward":
        raise UserError(
            f"grpo has no baselineShift and no lossScale, got {baseline_shift} and {scale!r}: leave them out"
        )
    ratio = torch.ones_like(rewards) if weights is None else weights
    used = ratio > 0
    advantages = group_advantages(rewards, used).to(policy_logprobs.dtype)
    logprobs = torch.where(used, policy_logprobs, 0.0)
    ratio = ratio * (logprobs - logprobs.detach()).exp()  # its value, with the gradient of pi/mu
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    return Loss(-objective.sum() / rewards.numel(), advantages, torch.zeros_like(policy_logprobs[:, 0]).detach())


def group_advantages(rewards: Tensor, used: Tensor) -> Tensor:
    """(P, K) float64: rewards less their group's mean, in its standard deviations (of the K values themselves).

    0 in empty slots, and in groups whose rewards are all the same.
    """
    r = torch.where(used, rewards.double(), 0.0)
    count = used.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(used, r - r.sum(1, keepdim=True) / count, 0.0)
    std = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return torch.where(std > _LEAST_STD, centred / std.clamp(min=_LEAST_STD), 0.0)
