"""AdamW with named state, the schedule and the clipping rule."""

import copy
import math
import random
from statistics import median

import pytest
import torch
from support.learning import run_config
from torch import nn

from tba.trainer.optim import CLIP_FACTOR, CLIP_WARMUP, CLIP_WINDOW, Optimizer, default_learning_rate


def objective(**changes):
    return run_config(**changes).objective


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (5, 3), "layer.bias": (3,), "head.weight": (2, 3)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(params):
        params[name].grad = torch.randn(params[name].shape, generator=generator)


def single(norm: float, optimizer: Optimizer, parameter: nn.Parameter, step: int = 1):
    """One step whose gradient has this norm."""
    parameter.grad = torch.tensor([norm])
    return optimizer.apply(step)


def scalar(**changes) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor([1.0]))
    return Optimizer({"w": parameter}, objective(**changes)), parameter


def test_first_update_by_hand():
    optimizer, parameter = scalar(learningRate=0.1, optimizer={"maxGradNorm": None, "weightDecay": 0.5})
    update = single(4.0, optimizer, parameter)
    # AdamW: decay 1 - 0.1 * 0.5, then the bias-corrected first step is lr * sign(g).
    assert parameter.item() == pytest.approx(0.95 - 0.1, abs=1e-6)
    assert (update.grad_norm, update.clipped, update.learning_rate) == (4.0, False, 0.1)


def test_learning_rate_follows_the_schedule_by_step_number():
    optimizer, parameter = scalar(learningRate=0.1, schedule={"warmupSteps": 4})
    rates = [single(1.0, optimizer, parameter, step).learning_rate for step in (1, 2, 4, 5)]
    assert rates == pytest.approx([0.025, 0.05, 0.1, 0.1])
    before = parameter.item()
    single(1.0, optimizer, parameter, 1)
    assert before - parameter.item() == pytest.approx(0.025, rel=1e-3)


def test_restored_state_goes_on_bit_for_bit_whatever_the_order_of_parameters():
    params = parameters()
    optimizer = Optimizer(params, objective())
    for step in range(1, 8):
        set_gradients(params, step)
        optimizer.apply(step)
    tensors, norms = optimizer.state()
    twins = {name: copy.deepcopy(params[name]) for name in reversed(params)}
    twin = Optimizer(twins, objective())
    shuffled = list(tensors.items())
    random.Random(0).shuffle(shuffled)
    twin.restore(shuffled, list(norms))
    for step in range(8, 15):
        set_gradients(params, step)
        set_gradients(twins, step)
        # The sum of squares of a norm depends on the order, hence approximately; nothing else may.
        mine, theirs = optimizer.apply(step), twin.apply(step)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
        assert not mine.clipped and not theirs.clipped
    assert all(torch.equal(params[name], twins[name]) for name in params)


def test_state_is_a_copy_that_later_steps_do_not_change():
    params = parameters()
    optimizer = Optimizer(params, objective())
    set_gradients(params, 1)
    optimizer.apply(1)
    tensors, norms = optimizer.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    set_gradients(params, 2)
    optimizer.apply(2)
    assert all(torch.equal(saved[name], tensors[name]) for name in saved) and len(norms) == 1
    assert {name.split("/", 1)[0] for name in tensors} == {"step", "exp_avg", "exp_avg_sq"}
    assert {name.split("/", 1)[1] for name in tensors} == set(params)


def test_a_rank_that_does_not_write_keeps_no_copy_of_the_moments():
    params = parameters()
    optimizer = Optimizer(params, objective())
    set_gradients(params, 1)
    optimizer.apply(1)
    assert optimizer.state(keep=False) == ({}, optimizer.state()[1])


def test_restore_does_not_share_memory_with_what_it_was_given():
    params = parameters()
    optimizer = Optimizer(params, objective())
    set_gradients(params, 1)
    optimizer.apply(1)
    tensors, norms = optimizer.state()
    optimizer.restore(tensors.items(), norms)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    set_gradients(params, 2)
    optimizer.apply(2)
    assert all(torch.equal(saved[name], tensors[name]) for name in saved)


def test_unknown_parameter_in_a_checkpoint_is_refused():
    optimizer = Optimizer(parameters(), objective())
    with pytest.raises(KeyError, match="other"):
        optimizer.restore([("exp_avg/other.weight", torch.zeros(2))], [])


def test_auto_clips_at_three_running_medians_after_warm_up():
    optimizer, parameter = scalar(optimizer={"maxGradNorm": "auto"})
    norms = [2.0, 1.0, 5.0, 4.0, 100.0]
    assert len(norms) == CLIP_WARMUP
    assert not any(single(norm, optimizer, parameter).clipped for norm in norms)
    assert not single(3 * 4.0 - 0.01, optimizer, parameter).clipped  # median 4
    assert median([*norms, 11.99]) == pytest.approx(4.5)
    clipped = single(13.6, optimizer, parameter)
    assert clipped.clipped and clipped.grad_norm == pytest.approx(13.6)
    assert parameter.grad is not None and parameter.grad.item() == pytest.approx(CLIP_FACTOR * 4.5, rel=1e-4)


def test_steps_without_any_gradient_do_not_make_auto_erase_the_first_real_one():
    optimizer, parameter = scalar(optimizer={"maxGradNorm": "auto"})
    for _ in range(CLIP_WINDOW):
        single(0.0, optimizer, parameter)
    assert not single(1.0, optimizer, parameter).clipped
    assert parameter.grad is not None and parameter.grad.item() == 1.0


def test_running_median_forgets_norms_older_than_its_window():
    optimizer, parameter = scalar(optimizer={"maxGradNorm": "auto"})
    for _ in range(CLIP_WINDOW):
        single(100.0, optimizer, parameter)
    for _ in range(CLIP_WINDOW):
        assert not single(1.0, optimizer, parameter).clipped
    assert single(3.5, optimizer, parameter).clipped
    assert len(optimizer.state()[1]) == CLIP_WINDOW


def test_fixed_limit_clips_from_the_first_step():
    optimizer, parameter = scalar(optimizer={"maxGradNorm": 0.5})
    assert single(2.0, optimizer, parameter).clipped
    assert parameter.grad is not None and parameter.grad.item() == pytest.approx(0.5, rel=1e-4)
    assert not single(0.4, optimizer, parameter).clipped


@pytest.mark.parametrize("limit", ["auto", 0.5])
def test_paper_scale_never_clips(limit):
    optimizer, parameter = scalar(lossScale="Paper", optimizer={"maxGradNorm": limit})
    for norm in [1.0] * 10 + [1e6]:
        assert not single(norm, optimizer, parameter).clipped
        assert parameter.grad is not None and parameter.grad.item() == norm


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("limit", ["auto", None, 0.5])
def test_gradient_that_is_not_finite_is_refused_before_it_changes_anything(value, limit):
    optimizer, parameter = scalar(optimizer={"maxGradNorm": limit})
    single(1.0, optimizer, parameter)
    before, state = parameter.item(), optimizer.state()
    with pytest.raises(FloatingPointError, match="at step 2 is"):
        single(value, optimizer, parameter, 2)
    assert parameter.item() == before
    tensors, norms = optimizer.state()
    assert norms == state[1] and all(torch.equal(tensors[n], state[0][n]) for n in tensors)


@pytest.mark.parametrize(
    ("count", "lora", "rate"),
    [
        (1, False, 1e-5),
        (10**9 - 1, False, 1e-5),
        (10**9, False, 3e-6),
        (8 * 10**9, False, 3e-6),
        (8 * 10**9 + 1, False, 1e-6),
        (10**9, True, 5e-5),
    ],
)
def test_default_learning_rate_depends_on_size(count, lora, rate):
    assert default_learning_rate(count, lora=lora) == rate


def test_learning_rate_of_the_job_wins_over_the_default():
    assert scalar(learningRate=None)[0].peak == 1e-5
    assert scalar(learningRate=0.25)[0].peak == 0.25
