"""Schedules over optimizer steps as pure functions. `step` is the number of the update, the first is 1."""

import math

from tba.contracts.config import Objective, Schedule
from tba.contracts.errors import UserError


def anneal(step: int, *, initial: float, final: float, anneal_steps: int, stop_step: int | None = None) -> float:
    """Linear way from `initial` at step 1 towards `final` at step anneal_steps + 1; `final` from `stop_step` on.

    `stop_step` defaults to `anneal_steps`; an earlier one makes a jump.
    Source: arXiv 2503.18929 (tba_algorithm.md §1.4).
    """
    _check_step(step)
    if step >= (anneal_steps if stop_step is None else stop_step):
        return final
    done = (step - 1) / anneal_steps
    return final * done + initial * (1 - done)


def beta_at(step: int, objective: Objective) -> float:
    """beta of update `step`: constant, or annealed from beta to betaFinal over betaAnnealSteps."""
    _check_step(step)
    if objective.beta_final is None or objective.beta_anneal_steps is None:
        return objective.beta
    return anneal(step, initial=objective.beta, final=objective.beta_final, anneal_steps=objective.beta_anneal_steps)


def learning_rate(step: int, schedule: Schedule, total_steps: int, peak: float) -> float:
    """Learning rate of update `step`: linear warm-up to `peak` at warmupSteps, then the decay; 0 beyond the last step.

    Each update 1..total_steps gets a positive rate; a decay of n steps ends at peak / n.
    """
    _check_step(step)
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    decay_steps = total_steps - schedule.warmup_steps
    if schedule.decay == "wsd":
        decay_steps = min(decay_steps, math.ceil(total_steps / 5))
    remaining = (total_steps - step + 1) / max(decay_steps, 1)  # 1 at the first decaying step
    remaining = min(max(remaining, 0.0), 1.0)
    if schedule.decay == "cosine":
        return peak * 0.5 * (1 - math.cos(math.pi * remaining))
    return peak * remaining


def _check_step(step: int) -> None:
    if step < 1:
        raise UserError(f"step must be >= 1 (the number of the update), got {step}")
