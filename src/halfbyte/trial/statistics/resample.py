"""Bootstrap over clusters - tasks with their repeats, or blocks of the schedule - and the limits taken from it.

What lies in one cluster goes together: repeats of a task share its difficulty, requests of a block share the machine's
mood. Both arms of a cluster are drawn together, so what they share cancels. Resamples come from a counter-based generator
with a fixed key: the same records give the same limits.

With few clusters percentile limits are too narrow, as if the spread were known: they are taken further out by the factor
Student's t asks for ("expanded percentiles"; Hesterberg, The American Statistician 69, 2015). Below ``least_clusters`` no
resampling can help: that all k clusters err to the same side of the truth has probability 2^-k, and for 2^-k > alpha not
even the most extreme cluster is a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from halfbyte.statistics.special import Reals, student_quantile

__all__ = ["RESAMPLES", "draws", "expanded_tail", "generator", "least_clusters", "limits"]

RESAMPLES = 10_000
_CHUNK = 2_000_000  # drawn counts held at once
_STREAMS = {"resample": 1, "null": 2}


def generator(purpose: str, size: int) -> np.random.Generator:
    """Random numbers that depend on nothing but the purpose and the number of clusters."""
    return np.random.Generator(np.random.Philox(key=[0x747269616C00 + _STREAMS[purpose], size]))


def least_clusters(alpha: float) -> int:
    """Fewest clusters whose most extreme one can be a limit at ``alpha``: 2^-k <= alpha (5 for .05)."""
    return max(2, math.ceil(-math.log2(alpha) - 1e-12))


@lru_cache(maxsize=256)
def expanded_tail(alpha: float, clusters: int) -> float:
    """The tail to cut off the resampled values of ``clusters`` clusters for limits of one-sided level ``alpha``."""
    t = student_quantile(1 - alpha, clusters - 1)
    return NormalDist().cdf(-math.sqrt(clusters / (clusters - 1)) * t)


@lru_cache(maxsize=4)
def draws(clusters: int) -> list[npt.NDArray[np.int16]]:
    """How often each cluster is drawn: chunks of [resamples, clusters], each row summing to ``clusters``."""
    resamples = RESAMPLES
    random, left, out = generator("resample", clusters), resamples, []
    while left:
        rows = min(left, max(1, _CHUNK // clusters))
        out.append(random.multinomial(clusters, np.full(clusters, 1 / clusters), size=rows).astype(np.int16))
        left -= rows
    return out


def limits(statistic: Callable[[Reals], Reals], clusters: int, alpha: float) -> tuple[float, float] | None:
    """Both one-sided limits at ``alpha`` of a statistic of clusters; None for fewer than ``least_clusters``.

    Arguments:
        statistic: counts of each cluster [resamples, clusters] -> values [resamples]; +-inf is allowed, NaN is not.
    """
    if clusters < least_clusters(alpha):
        return None
    values = np.sort(np.concatenate([statistic(chunk.astype(np.float64)) for chunk in draws(clusters)]))
    assert not np.isnan(values).any()
    tail = expanded_tail(alpha, clusters)
    rank = max(0, math.floor(tail * len(values)) - 1)
    return float(values[rank]), float(values[-1 - rank])
