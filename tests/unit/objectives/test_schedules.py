import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts.config import Objective, Schedule
from tba.contracts.errors import UserError
from tba.objectives.schedules import anneal, beta_at, learning_rate


@pytest.mark.parametrize(("step", "beta"), [(1, 1.0), (16, 0.88867), (31, 0.77734), (32, 0.05), (256, 0.05)])
def test_tldr_beta_jumps_at_step_32(step: int, beta: float) -> None:
    assert anneal(step, initial=1.0, final=0.05, anneal_steps=128, stop_step=32) == pytest.approx(beta, abs=1e-5)


@pytest.mark.parametrize(("step", "beta"), [(1, 0.012), (250, 0.008016), (499, 0.004032), (500, 0.004), (900, 0.004)])
def test_gsm8k_beta_falls_linearly(step: int, beta: float) -> None:
    objective = Objective(beta=0.012, beta_final=0.004, beta_anneal_steps=500)
    assert beta_at(step, objective) == pytest.approx(beta, abs=1e-6)


def test_beta_without_a_final_value_is_constant() -> None:
    assert beta_at(1, Objective(beta=0.3)) == beta_at(10**6, Objective(beta=0.3)) == 0.3


@pytest.mark.parametrize(
    ("decay", "step", "share"),
    [
        ("constant", 5, 0.5),
        ("constant", 10, 1.0),
        ("constant", 100, 1.0),
        ("linear", 11, 1.0),
        ("linear", 56, 0.5),
        ("linear", 100, 1 / 90),
        ("linear", 101, 0.0),
        ("cosine", 11, 1.0),
        ("cosine", 56, 0.5),
        ("cosine", 101, 0.0),
        ("wsd", 80, 1.0),
        ("wsd", 81, 1.0),
        ("wsd", 91, 0.5),
        ("wsd", 100, 0.05),
        ("wsd", 101, 0.0),
    ],
)
def test_learning_rate_by_hand(decay: str, step: int, share: float) -> None:
    schedule = Schedule(warmup_steps=10, decay=decay)
    assert learning_rate(step, schedule, 100, 2e-5) == pytest.approx(2e-5 * share, abs=1e-18)


@given(
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    decay=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
)
def test_every_step_has_a_positive_rate_that_rises_then_falls(warmup: int, total: int, decay: str) -> None:
    schedule = Schedule(warmup_steps=warmup, decay=decay)
    rates = [learning_rate(u, schedule, total, 1.0) for u in range(1, total + 1)]
    assert all(0 < rate <= 1 and math.isfinite(rate) for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_step_0_is_refused() -> None:
    for call in (lambda: learning_rate(0, Schedule(), 10, 1.0), lambda: beta_at(0, Objective())):
        with pytest.raises(UserError, match="step must be >= 1"):
            call()
