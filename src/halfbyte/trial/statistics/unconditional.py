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

from halfbyte.statistics.special import Reals, log_factorials, normal_quantile
from halfbyte.trial.statistics.tango import check_counts, interval, score, scores

__all__ = ["Gains", "least_gains", "lower_bound", "p_value", "pass_probability", "size"]

Gains = npt.NDArray[np.int64]

_TIE = 1e-9  # scores nearer than this are equal
_CELLS = 1_000_000  # probabilities held at once


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
    """P(gains >= region[flips]) at a true difference, for each share of flips in [|difference|, 1].

    Arguments:
        region: as ``_region`` makes them: with one flip more the fewest gains stay or rise by one.
    """
    shares = np.atleast_1d(np.asarray(flips, float))
    gain = np.where(shares > 0, np.clip((1 + difference / np.where(shares > 0, shares, 1.0)) / 2, 0.0, 1.0), 0.5)
    # P(Binomial(m, g) >= region[m]) for all m: one flip more adds g P(= region - 1) where the least stays, and takes
    # (1 - g) P(= region) where it rises.
    before, rises = np.arange(n), np.diff(region)
    assert np.all((rises == 0) | (rises == 1))
    at = region[:-1] - 1 + rises
    real = (at >= 0) & (at <= before)
    at = np.where(real, at, 0)
    logs = log_factorials(n)
    ways = np.where(real, logs[before] - logs[at] - logs[before - at], -np.inf)
    out = np.empty(len(shares))
    for rows in np.array_split(np.arange(len(shares)), -(-len(shares) * (n + 1) // _CELLS)):
        share, g = shares[rows], gain[rows]
        moved = np.exp(ways + _powers(at, g) + _powers(before - at, 1 - g)) * (g[:, None] - rises)
        tails = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(moved, axis=1)], axis=1) + (region[0] == 0)
        out[rows] = (_binomial(np.arange(n + 1), n, share[:, None]) * np.clip(tails, 0.0, 1.0)).sum(axis=1)
    return out


def size(region: Gains, n: int, difference: float) -> float:
    """Largest ``pass_probability`` over the shares of flips.

    Taken on the grid of ``_shares``, then on finer ones about each of its local maxima that come near the largest.
    """
    shares = _shares(n, difference)
    values = pass_probability(region, n, difference, shares)
    best = float(values.max())
    padded = np.concatenate([[-1.0], values, [-1.0]])
    peaks = np.nonzero((values >= padded[:-2]) & (values >= padded[2:]) & (values >= 0.9 * best))[0]
    low, high = shares[np.maximum(peaks - 1, 0)], shares[np.minimum(peaks + 1, len(shares) - 1)]
    for points in (17, 17, 17, 17):
        inside = np.linspace(low, high, points, axis=1)
        values = pass_probability(region, n, difference, inside.ravel()).reshape(inside.shape)
        best = max(best, float(values.max()))
        # Two peaks at most matter from here on: one falls behind by more than a finer grid can lift it.
        kept = np.argsort(values.max(axis=1))[-2:]
        inside, top = inside[kept], values[kept].argmax(axis=1)
        rows = np.arange(len(kept))
        low, high = inside[rows, np.maximum(top - 1, 0)], inside[rows, np.minimum(top + 1, points - 1)]
    return best


def _shares(n: int, difference: float) -> Reals:
    """Shares of flips from |difference| to 1, evenly in two scales at once, for the size varies in both.

    One is where a share of n has the same spread everywhere, as the number of flips asks. The other is that of the rarer kind
    of flip, which has a chance of (share - |difference|) / 2: just above |difference| the size rises and falls while the share
    hardly changes (n = 181, difference -.2: the largest lies at .203, between two points of the first grid).
    """
    step = 1 / (4 * math.sqrt(n))
    both = _even(abs(difference), 1.0, step), abs(difference) + 2 * _even(0.0, (1 - abs(difference)) / 2, step)
    return np.unique(np.clip(np.concatenate(both), abs(difference), 1.0))


def _even(low: float, high: float, step: float) -> Reals:
    """Probabilities from ``low`` to ``high``, evenly in arcsin of the root, 16 or more."""
    least, end = math.asin(math.sqrt(low)), math.asin(math.sqrt(high))
    return np.asarray(np.sin(np.linspace(least, end, max(16, math.ceil((end - least) / step)))) ** 2)


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
