"""What tests judge by, against scipy 1.17's numbers."""

import numpy as np
import pytest
from support.plausibility import is_plausible, ks_2samp


def samples(share):
    """Of 0..59: uniform ones, and others of which `share` lie in the lower half."""
    random = np.random.default_rng(7)
    low = random.random(4000) < share
    return random.integers(0, 60, 6000), np.where(low, random.integers(0, 30, 4000), random.integers(0, 60, 4000))


@pytest.mark.parametrize(
    ("share", "statistic", "pvalue"),
    [(0.0, 0.010833333333, 0.93790), (0.04, 0.018916666667, 0.35252), (0.06, 0.025416666667, 0.088489),
     (0.2, 0.0955, 1.6755e-19)],
)  # fmt: skip
def test_distance_and_probability_are_scipys(share, statistic, pvalue):
    found = ks_2samp(*samples(share))
    assert found.statistic == pytest.approx(statistic, abs=1e-11)
    assert found.pvalue == pytest.approx(pvalue, rel=0.1 if pvalue < 1e-6 else 0.005)


def test_a_probability_is_plausible_within_the_exact_interval_alone():
    # Clopper-Pearson for 70 of 100 at 95 %: 0.60019 to 0.78759
    assert [is_plausible(70, 100, p, confidence=0.95) for p in (0.6000, 0.6004, 0.7874, 0.7878)] == [0, 1, 1, 0]
