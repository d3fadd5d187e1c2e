"""Intervals for a handful of seeds: the exact bootstrap and Student's t. Pure functions.

With n values the bootstrap has n^n resamples, but only (2n - 1 choose n) different ones; up to ``EXACT`` values all of them
are taken, so that an interval depends on nothing but the values. Beyond, resamples come from a counter-based generator with
a fixed key. Neither depends on the order of the values or on how often one has looked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from halfbyte.statistics.special import student_quantile

__all__ = ["LEVEL", "Estimate", "bootstrap_interval", "estimate", "t_interval"]

LEVEL = 0.95
EXACT = 8
RESAMPLES = 20_000


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with 95% intervals; None where one value says nothing about its spread.

    Arguments:
        mean: of the values.
        n: number of values.
        low, high: bootstrap percentiles.
        t_low, t_high: Student's t.
    """

    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    t_low: float | None = None
    t_high: float | None = None

    def to_json(self) -> dict[str, float | int | None]:
        """A JSON object."""
        return asdict(self)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and intervals of ``values``, one a seed; None without values."""
    if not values:
        return None
    ordered = sorted(values)  # sums, and so the last bits, do not depend on the order of the seeds
    mean = math.fsum(ordered) / len(ordered)
    if len(ordered) < 2:
        return Estimate(mean, 1)
    return Estimate(mean, len(ordered), *bootstrap_interval(ordered), *t_interval(ordered))


def bootstrap_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of the mean: the smallest resampled means whose probability reaches (1 -+ level) / 2.

    Efron, Annals of Statistics 7, 1979. Needs at least one value.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n <= EXACT:
        counts, ways = _resamples(n)
        means = (counts * np.asarray(ordered)).sum(axis=1) / n
    else:
        random = np.random.Generator(np.random.Philox(key=[0x68616C66, n]))
        drawn = random.integers(0, n, size=(RESAMPLES, n))
        means, ways = np.asarray(ordered)[drawn].mean(axis=1), np.ones(RESAMPLES, np.int64)
    order = np.argsort(means, kind="stable")
    reached = np.cumsum(ways[order]) / ways.sum()
    tail = (1 - level) / 2
    ends = (int(np.searchsorted(reached, p - 1e-9)) for p in (tail, 1 - tail))
    low, high = (float(means[order[end]]) for end in ends)
    return low, high


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Student's interval of the mean of at least two values."""
    n = len(values)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = student_quantile((1 + level) / 2, n - 1) * deviation / math.sqrt(n)
    return mean - half, mean + half


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as an ordered sum of ``parts`` counts from 0."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


@cache
def _resamples(n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Counts of each value in the different resamples [c, n], and how many of the n^n resamples have them [c]."""
    counts = list(_compositions(n, n))
    ways = [math.factorial(n) // math.prod(map(math.factorial, row)) for row in counts]
    return np.array(counts, np.int64), np.array(ways, np.int64)
