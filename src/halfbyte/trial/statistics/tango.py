"""Tango's score test and interval for the difference of two paired proportions.

T. Tango, Statistics in Medicine 17, 1998. Of n pairs, ``gains`` pass in the candidate alone and ``losses`` in the
baseline alone; the difference is (gains - losses) / n. The standard error is taken under the difference in question, so
pairs without a single flip still leave an honest interval, where mean +- t * sd / sqrt(n) gives (0, 0).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from halfbyte.statistics.special import Reals, normal_quantile

__all__ = ["check_counts", "interval", "score", "scores"]


def check_counts(gains: int, losses: int, n: int) -> None:
    """Raises:
    ValueError: counts that no n pairs can have.
    """
    if n < 1 or gains < 0 or losses < 0 or gains + losses > n:
        raise ValueError(f"{gains} gains and {losses} losses of {n} pairs")


def scores(gains: npt.ArrayLike, losses: npt.ArrayLike, n: int, difference: npt.ArrayLike) -> Reals:
    """Score statistics for a true ``difference`` in (-1, 1), elementwise: standard normal there, falling in ``difference``.

    The nuisance is the maximum-likelihood probability q of a loss given the difference (Tango's equation; the larger root,
    in the form without cancellation).
    """
    b, c, delta = np.broadcast_arrays(
        np.asarray(gains, float), np.asarray(losses, float), np.asarray(difference, float)
    )
    second = -b - c + (2 * n - b + c) * delta
    third = -c * delta * (1 - delta)
    root = np.sqrt(np.maximum(second * second - 8 * n * third, 0.0))
    rising = second > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(rising, -2 * third / np.where(rising, second + root, 1.0), (root - second) / (4 * n))
        variance = n * np.maximum(2 * q + delta * (1 - delta), 0.0)
        above = b - c - n * delta
        # No variance is left only where the pairs are all gains or all losses, and at a difference of 0 without a flip.
        score = np.where(variance > 0, above / np.sqrt(np.where(variance > 0, variance, 1.0)), np.sign(above) * np.inf)
    return np.asarray(score, np.float64)


def score(gains: int, losses: int, n: int, difference: float) -> float:
    """One score statistic; 0 where the difference is the observed one."""
    value = float(scores(gains, losses, n, difference))
    return 0.0 if math.isnan(value) else value


def interval(gains: int, losses: int, n: int, alpha: float) -> tuple[float, float]:
    """Both one-sided limits at ``alpha``: together an interval of level 1 - 2 alpha.

    With no flip in n pairs they are -+ z^2 / (n + z^2).
    """
    check_counts(gains, losses, n)
    return _lower(gains, losses, n, alpha), -_lower(losses, gains, n, alpha)


def _lower(gains: int, losses: int, n: int, alpha: float) -> float:
    """The difference at which the score is z; the score falls from there on."""
    z = normal_quantile(1 - alpha)
    low, high = -1.0, (gains - losses) / n
    for _ in range(100):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if score(gains, losses, n, middle) > z else (low, middle)
    return low
