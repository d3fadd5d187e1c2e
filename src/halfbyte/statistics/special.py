"""Distribution functions that the statistics need, in numpy: incomplete beta, binomial tails, Student's and normal quantiles.

scipy has them all; a user who asks whether a server is good enough, or repeats a study, should not need it. Tests hold these
against scipy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["Reals", "binomial_tail", "incomplete_beta", "log_factorials", "normal_quantile", "student_quantile"]

Reals = npt.NDArray[np.float64]
_NORMAL = NormalDist()


def normal_quantile(probability: float) -> float:
    """z with P(Z <= z) = probability, in (0, 1)."""
    return _NORMAL.inv_cdf(probability)


def student_quantile(probability: float, freedom: float) -> float:
    """t with P(T <= t) = probability, in (0, 1), for ``freedom`` > 0 degrees, by bisection of the incomplete beta."""
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)

    def above(t: float) -> float:
        x = freedom / (freedom + t * t)
        return 0.5 * float(incomplete_beta(np.array(freedom / 2), np.array(0.5), np.array(x)))

    low, high = 0.0, 1.0
    while above(high) > 1 - probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) > 1 - probability else (low, middle)
    return (low + high) / 2


def log_factorials(n: int) -> Reals:
    """log k! for k = 0..n, and on to some further k."""
    return _table(1 << (n + 1).bit_length())[1:]


def binomial_tail(least: npt.ArrayLike, n: npt.ArrayLike, p: npt.ArrayLike) -> Reals:
    """P(X >= least) for X ~ Binomial(n, p), elementwise; counts are integers, ``n`` >= 0."""
    k, m, x = np.broadcast_arrays(np.asarray(least, float), np.asarray(n, float), np.asarray(p, float))
    out = np.where(k <= 0, 1.0, 0.0)
    inside = (k > 0) & (k <= m)
    if inside.any():
        out[inside] = incomplete_beta(k[inside], m[inside] - k[inside] + 1, x[inside])
    return out


def incomplete_beta(a: Reals, b: Reals, x: Reals) -> Reals:
    """Regularised incomplete beta function I_x(a, b), elementwise, for a, b > 0 and x in [0, 1].

    The continued fraction 26.5.8 of Abramowitz and Stegun by the modified Lentz method, on the side of the mean where it
    converges fast. Relative error about 1e-12 for a + b up to some thousands.
    """
    a, b, x = np.broadcast_arrays(np.asarray(a, float), np.asarray(b, float), np.asarray(x, float))
    flip = x > (a + 1) / (a + b + 2)
    a, b, x = np.where(flip, b, a), np.where(flip, a, b), np.where(flip, 1 - x, x)
    with np.errstate(divide="ignore"):
        front = _log_gamma(a + b) - _log_gamma(a) - _log_gamma(b) + a * np.log(x) + b * np.log1p(-x)
    value = np.exp(front) / a * _fraction(a, b, x)
    return np.asarray(np.where(flip, 1 - value, value))


def _fraction(a: Reals, b: Reals, x: Reals) -> Reals:
    """The fraction; for x below the mean its denominators stay positive, so none needs a guard."""
    total, ratio = a + b, np.ones_like(x)
    below = 1 / (1 - total * x / (a + 1))
    value = below.copy()
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (total + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            below, ratio = 1 / (1 + term * below), 1 + term / ratio
            step = below * ratio
            value *= step
        if np.abs(step - 1).max(initial=0.0) < 1e-14:
            break
    return value


def _log_gamma(x: Reals) -> Reals:
    """log Gamma; counts come from a table, the halves of Student's distribution one by one."""
    whole = x.astype(np.int64)
    if x.size and np.array_equal(whole, x):
        return _table(1 << int(whole.max()).bit_length())[whole]
    return np.array([math.lgamma(v) for v in x.ravel()]).reshape(x.shape)


@lru_cache(maxsize=4)
def _table(size: int) -> Reals:
    return np.array([math.inf, *(math.lgamma(k) for k in range(1, size + 1))])
