"""The exact unconditional test of non-inferiority on paired outcomes, ordered by Tango's score.

Tango's limit is asymptotic: with few flips a candidate exactly at the margin passes up to 8% of the time at a nominal 5%
(n = 52, margin .05, no flip seen: .95^52 = 6.9%). Here the probability of a score at least as high as the one seen is
computed, at the margin, for every share of flips, and the largest is the p-value: at most ``alpha`` of candidates at the
margin pass, whatever their share of flips (Hsueh, Liu and Chen, Biometrics 57, 2001).

A true difference d and a share of flips f give gains (f + d) / 2 and losses (f - d) / 2; the number of flips is
Binomial(n, f) and the gains among them Binomial(flips, (1 + d / f) / 2). More gains at the same flips raise the score, so
the tables with a score of at least t are, for every number of flips, those with at least so many gains.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from halfbyte.statistics.special import Reals, binomial_tail, log_factorials, normal_quantile
from halfbyte.trial.statistics.tango import check_counts, interval, score, scores

__all__ = ["Gains", "least_gains", "lower_bound", "p_value", "pass_probability", "size"]

Gains = npt.NDArray[np.int64]

_TIE = 1e-9  # scores nearer than this are equal
_WIDTH = 9.0  # standard deviations of the number of flips that are summed over


@lru_cache(maxsize=4096)
def p_value(gains: int, losses: int, n: int, difference: float) -> float:
    """Largest probability, over all shares of flips, of a score as high as that of this table if ``difference`` is true."""
    check_counts(gains, losses, n)
    seen = score(gains, losses, n, difference)
    if seen <= 0:
        return 1.0
    return size(_region(n, difference, seen - _TIE), n, difference)


@lru_cache(maxsize=4096)
def lower_bound(gains: int, losses: int, n: int, alpha: float) -> float:
    """Largest difference below which everything is rejected at ``alpha``, to about 1e-6; never above Tango's limit.

    The p-value need not fall steadily with the difference, so the search goes down from Tango's limit by bisection of the
    first crossing on a grid and takes the lower end: conservative by less than a grid step.
    """
    check_counts(gains, losses, n)
    low, _ = interval(gains, losses, n, alpha)
    if low <= -1.0 or p_value(gains, losses, n, low) <= alpha:
        return low
    inside, step = low, max(0.25 / n, 1e-4)
    while p_value(gains, losses, n, outside := max(inside - step, -1 + 1e-9)) > alpha:
        if outside <= -1 + 1e-9:
            return -1.0
        inside, step = outside, 1.5 * step
    while inside - outside > 1e-6:
        middle = (inside + outside) / 2
        if p_value(gains, losses, n, middle) > alpha:
            inside = middle
        else:
            outside = middle
    return outside


@lru_cache(maxsize=512)
def _boundary(n: int, margin: float, alpha: float) -> tuple[int, ...]:
    """The pass region: all tables with a score above z, less those of the lowest scores until its size is ``alpha``."""
    z = normal_quantile(1 - alpha)
    region = _region(n, -margin, z)
    while (excess := size(region, n, -margin)) > alpha:
        region = _shrunk(region, n, -margin, alpha, excess)
    return tuple(region.tolist())


def least_gains(n: int, margin: float, alpha: float) -> Gains:
    """Gains that pass, for every number of flips 0..n; one more than the flips where none pass.

    Passing means Tango's score at -margin above z and an exact p-value of at most ``alpha``.
    """
    return np.array(_boundary(n, margin, alpha), np.int64)


def pass_probability(region: Gains, n: int, difference: float, flips: npt.ArrayLike) -> Reals:
    """P(gains >= region[flips]) at a true difference, for each share of flips in [|difference|, 1]."""
    shares = np.atleast_1d(np.asarray(flips, float))
    counts = np.arange(n + 1)
    spread = _WIDTH * np.sqrt(n * shares * (1 - shares)) + _WIDTH
    near = (region <= counts) & (np.abs(counts - n * shares[:, None]) <= spread[:, None])
    row, count = np.nonzero(near)
    share = shares[row]
    gain = np.where(share > 0, np.clip((1 + difference / np.where(share > 0, share, 1.0)) / 2, 0.0, 1.0), 0.5)
    each = _binomial(count, n, share) * binomial_tail(region[count], count, gain)
    return np.bincount(row, each, minlength=len(shares)).astype(np.float64)


def size(region: Gains, n: int, difference: float) -> float:
    """Largest ``pass_probability`` over the shares of flips.

    As a function of the share it is a polynomial that varies over about sqrt(share (1 - share) / n): a grid four times as
    fine, then finer grids about its largest values; what is left between their points is below 1e-9.
    """
    shares = _shares(n, difference)
    values = pass_probability(region, n, difference, shares)
    angles = np.arcsin(np.sqrt(shares))
    least, end, step = angles[0], angles[-1], angles[1] - angles[0]
    best = float(values.max())
    for count in (3, 1, 1, 1):
        centres = angles[np.argsort(values)[-count:]]
        angles = np.clip((centres[:, None] + np.linspace(-step, step, 17)).ravel(), least, end)
        values = pass_probability(region, n, difference, np.clip(np.sin(angles) ** 2, abs(difference), 1.0))
        best, step = max(best, float(values.max())), step / 8
    return best


def _shares(n: int, difference: float) -> Reals:
    """Shares of flips from |difference| to 1, evenly in the scale where a share of n has the same spread everywhere."""
    least, end = math.asin(math.sqrt(abs(difference))), math.pi / 2
    grid = np.linspace(least, end, max(16, math.ceil((end - least) * 4 * math.sqrt(n))))
    return np.asarray(np.clip(np.sin(grid) ** 2, abs(difference), 1.0))


def _shrunk(region: Gains, n: int, difference: float, alpha: float, excess: float) -> Gains:
    """The region without its tables of lowest score, as many as bring its probability on the grid down to ``alpha``."""
    counts = np.arange(n + 1)
    shares = _shares(n, difference)
    values = pass_probability(region, n, difference, shares)
    values = values + max(0.0, excess - float(values.max()))  # what lies between the points of the grid
    # A row of tables at a time is what can be lost next: the lowest gains of every number of flips.
    depth = 4
    gains = (region[:, None] + np.arange(depth)).ravel()
    flips = np.repeat(counts, depth)
    gains, flips = gains[gains <= flips], flips[gains <= flips]
    each = scores(gains, flips - gains, n, difference)
    order = np.argsort(each, kind="stable")
    gains, flips, each = gains[order], flips[order], each[order]
    # Beyond the lowest score of a deepest table there may be tables that are not listed.
    deepest = region + depth
    listed = deepest <= counts
    sure = float(scores(deepest[listed], (counts - deepest)[listed], n, difference).min()) if listed.any() else math.inf
    known = each < sure - _TIE
    gains, flips, each = gains[known][:4000], flips[known][:4000], each[known][:4000]
    left = (values[:, None] - np.cumsum(_trinomial(gains, flips - gains, n, difference, shares), axis=1)).max(axis=0)
    below = np.nonzero(left <= alpha)[0]
    last = int(below[0]) if len(below) else len(each) - 1
    return _region(n, difference, float(each[last]) + _TIE)


def _region(n: int, difference: float, least_score: float) -> Gains:
    """For every number of flips the fewest gains with a score of at least ``least_score``, by bisection."""
    flips = np.arange(n + 1)
    low, high = np.full(n + 1, -1), flips + 1  # low fails, high passes (or does not exist)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        open_ = high - low > 1
        at = np.clip(middle, 0, flips)
        passes = scores(at, flips - at, n, difference) >= least_score
        high = np.where(open_ & passes, middle, high)
        low = np.where(open_ & ~passes, middle, low)
    return high.astype(np.int64)


def _binomial(k: Gains, n: int, p: Reals) -> Reals:
    """P(X = k), X ~ Binomial(n, p), elementwise."""
    logs = log_factorials(n)
    inside = np.clip(p, 1e-300, 1 - 1e-16)
    value = np.exp(logs[n] - logs[k] - logs[n - k] + k * np.log(inside) + (n - k) * np.log1p(-inside))
    return np.asarray(np.where(p <= 0, k == 0, np.where(p >= 1, k == n, value)), float)


def _trinomial(gains: Gains, losses: Gains, n: int, difference: float, shares: Reals) -> Reals:
    """Probability of each table at each share of flips: [shares, tables]."""
    flips = gains + losses
    gain = np.clip((1 + difference / np.maximum(shares, 1e-300)) / 2, 0.0, 1.0)
    logs = log_factorials(n)
    ways = np.exp(logs[flips] - logs[gains] - logs[losses] + _powers(gains, gain) + _powers(losses, 1 - gain))
    return np.asarray(_binomial(flips[None], n, shares[:, None]) * ways)


def _powers(count: Gains, base: Reals) -> Reals:
    """count * log(base) [bases, counts] with 0 log 0 = 0."""
    logs = np.log(np.maximum(base, 1e-300))[:, None]
    return np.asarray(count[None] * logs)
