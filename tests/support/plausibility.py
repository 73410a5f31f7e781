"""Statistics that tests ask for. Not scipy's: where it is installed, transformers loads it in every process."""

from math import exp, lgamma, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class KolmogorovSmirnov(NamedTuple):
    """Of two samples: the largest distance between their distribution functions, and how likely it is by chance."""

    statistic: float
    pvalue: float


def ks_2samp(first: ArrayLike, second: ArrayLike) -> KolmogorovSmirnov:
    """Two-sided, with the p-value of large samples (Stephens' correction); ties make it larger than it is."""
    a, b = np.sort(np.asarray(first)), np.sort(np.asarray(second))
    points = np.concatenate([a, b])
    below_a, below_b = (np.searchsorted(x, points, side="right") / len(x) for x in (a, b))
    distance = float(np.abs(below_a - below_b).max())
    root = sqrt(len(a) * len(b) / (len(a) + len(b)))
    return KolmogorovSmirnov(distance, _kolmogorov(distance * (root + 0.12 + 0.11 / root)))


def is_plausible(successes: int, trials: int, probability: float, *, confidence: float) -> bool:
    """Whether `probability` lies in the exact (Clopper-Pearson) confidence interval of `successes` of `trials`."""
    mass = [_binomial(k, trials, probability) for k in range(trials + 1)]
    tail = (1 - confidence) / 2
    return sum(mass[: successes + 1]) > tail and sum(mass[successes:]) > tail


def _kolmogorov(x: float) -> float:
    """The probability that Kolmogorov's distribution exceeds `x`."""
    if x < 0.2:  # 1 - 1e-12; the series converges slowly there
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * x) ** 2) for k in range(1, 101))))


def _binomial(k: int, n: int, p: float) -> float:
    return exp(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(p) + (n - k) * log(1 - p))
