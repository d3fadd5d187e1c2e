"""Percentiles of latencies, and which of them a sample can carry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halfbyte.statistics.special import Reals
from halfbyte.trial.statistics.resample import limits

__all__ = ["EXCEEDANCES", "percentile", "ratio_limits", "requests_needed", "value_limits"]

#: Requests that must lie beyond a percentile. The number beyond it varies by about its square root: with 10, a 95% limit by
#: order statistics lies about 5 ranks out and still inside the sample; with 3 (59 requests at p95) it is the largest
#: value itself, and below that there is none.
EXCEEDANCES = 10

_CELLS = 4_000_000


def requests_needed(q: float) -> int:
    """Fewest requests an arm that carry quantile ``q`` in (0, 1): 20 for p50, 200 for p95."""
    return math.ceil(EXCEEDANCES / min(q, 1 - q) - 1e-9)


def percentile(values: npt.ArrayLike, q: float) -> float:
    """The smallest value that at least a share ``q`` does not exceed: an observed latency, nothing in between."""
    ordered = np.sort(np.asarray(values, float))
    return float(ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)])


def ratio_limits(
    baseline: Sequence[npt.ArrayLike], candidate: Sequence[npt.ArrayLike], q: float, alpha: float
) -> tuple[float, float] | None:
    """Limits of quantile(candidate) / quantile(baseline), blocks drawn with both arms; None for too few blocks.

    Arguments:
        baseline, candidate: latencies by block, the same blocks in the same order.
    """
    lower, upper = _Weighted(baseline, q), _Weighted(candidate, q)
    return limits(lambda drawn: upper(drawn) / lower(drawn), len(baseline), alpha)


def value_limits(blocks: Sequence[npt.ArrayLike], q: float, alpha: float) -> tuple[float, float] | None:
    """Limits of a quantile itself, by blocks."""
    return limits(_Weighted(blocks, q), len(blocks), alpha)


class _Weighted:
    """Quantile of the values of drawn blocks, all resamples at once: cumulated counts over the sorted values."""

    def __init__(self, blocks: Sequence[npt.ArrayLike], q: float) -> None:
        arrays = [np.asarray(block, float) for block in blocks]
        values = np.concatenate(arrays)
        order = np.argsort(values, kind="stable")
        self.values = values[order]
        block = np.repeat(np.arange(len(arrays)), [len(a) for a in arrays])[order]
        # Values of each block up to every value: [blocks, values]; whole numbers, so products with counts are exact.
        self.reached = np.cumsum(block == np.arange(len(arrays))[:, None], axis=1, dtype=np.float64)
        self.q = q

    def __call__(self, drawn: Reals) -> Reals:
        out = np.empty(len(drawn))
        rows = max(1, _CELLS // len(self.values))
        for begin in range(0, len(drawn), rows):
            reached = drawn[begin : begin + rows] @ self.reached
            least = self.q * reached[:, -1:] - 1e-9
            out[begin : begin + rows] = self.values[np.argmax(reached >= np.maximum(least, 0.5), axis=1)]
        return out
