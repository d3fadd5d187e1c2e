"""Exact limits of one proportion."""

from __future__ import annotations

from functools import lru_cache

from halfbyte.statistics.special import binomial_tail

__all__ = ["interval", "lower_limit", "requests_for_rate", "upper_limit"]


def interval(successes: int, n: int, alpha: float) -> tuple[float, float]:
    """Both one-sided limits at ``alpha``: together an interval of level 1 - 2 alpha; (0, 1) for n = 0."""
    return lower_limit(successes, n, alpha), upper_limit(successes, n, alpha)


def upper_limit(successes: int, n: int, alpha: float) -> float:
    """Clopper and Pearson's one-sided upper limit (Biometrika 26, 1934): P(X <= successes | limit) = alpha.

    1 for n = 0. The probability that the limit lies below the truth is at most ``alpha``, also at 0 of n.
    """
    return 1.0 - lower_limit(n - successes, n, alpha)


@lru_cache(maxsize=4096)
def lower_limit(successes: int, n: int, alpha: float) -> float:
    """The one-sided lower limit: P(X >= successes | limit) = alpha; 0 at none of n."""
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n}")
    if successes == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(binomial_tail(successes, n, middle)) < alpha else (low, middle)
    return (low + high) / 2


def requests_for_rate(limit: float, alpha: float, failures: int = 0) -> int:
    """Fewest requests of which ``failures`` may fail and the upper limit still is at most ``limit`` (in (0, 1))."""
    low, high = failures, max(1, 2 * failures)
    while upper_limit(failures, high, alpha) > limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if upper_limit(failures, middle, alpha) > limit else (low, middle)
    return high
