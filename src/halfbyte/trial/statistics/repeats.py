"""The score test for tasks with repeats: Tango's, with as many outcomes of a task as its repeats allow.

The difference of a task is the mean of its repeats in the candidate less that in the baseline: one of the multiples of 1/R
in [-1, 1]. Tasks are independent, repeats of a task are not, so the unit is the task. The statistic is the mean difference
less the one in question, over the standard error that the most likely distribution with that mean has: for one repeat
exactly Tango's. Unseen failures keep their place: where the seen differences cannot have so low a mean, the rest of the
probability lies at -1. So tasks without a flip leave the interval that as many single pairs leave, however often they were
repeated: repeats say nothing about tasks that were not asked. (Generalisation ours; the constrained likelihood is that of
Owen's empirical likelihood, Biometrika 75, 1988, with the ends of the scale added.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.statistics.special import Reals, normal_quantile
from halfbyte.trial.statistics.resample import generator, limits

__all__ = ["bootstrap_interval", "bootstrap_p_value", "interval", "null_distribution", "score"]

NULL_RESAMPLES = 20_000


def _collect(differences: npt.ArrayLike) -> tuple[Reals, Reals]:
    """The different values, among them -1 and 1, and how often each was seen."""
    values = np.asarray(differences, float)
    if values.size == 0 or np.abs(values).max() > 1 + 1e-12:
        raise ValueError("differences of tasks lie in [-1, 1]")
    support, times = np.unique(np.concatenate([np.round(values, 12), [-1.0, 1.0]]), return_counts=True)
    counts = times.astype(np.float64)
    counts[0] -= 1
    counts[-1] -= 1
    return support, counts


def _fit(support: Reals, counts: Reals, difference: float) -> tuple[Reals, Reals]:
    """Most likely distributions with mean ``difference`` below the seen means, for rows of counts [rows, support].

    p = share / (1 + lambda (value - difference)), lambda by bisection; at its largest value the rest goes to -1.

    Returns:
        probabilities [rows, support], lambda [rows].
    """
    share = counts / counts.sum(axis=1, keepdims=True)
    above = support - difference
    low, high = np.zeros(len(counts)), np.full(len(counts), 1 / (1 + difference))

    def terms(strength: Reals) -> Reals:
        below = 1 + strength[:, None] * above
        return np.where(share > 0, share / np.where(share > 0, np.maximum(below, 1e-300), 1.0), 0.0)

    for _ in range(60):
        middle = (low + high) / 2
        rising = (terms(middle) * above).sum(axis=1) > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    p = terms(low)
    p[:, 0] += np.maximum(1 - p.sum(axis=1), 0.0)
    return p, low


def _scores(support: Reals, counts: Reals, difference: float) -> Reals:
    """Score statistics of rows of counts [rows, support]; rows whose mean is not above ``difference`` get 0."""
    n = counts.sum(axis=1)
    means = counts @ support / n
    out = np.zeros(len(counts))
    above = means > difference + 1e-12
    if above.any():
        p, _ = _fit(support, counts[above], difference)
        variance = np.maximum(p @ support**2 - (p @ support) ** 2, 0.0)
        with np.errstate(divide="ignore"):
            out[above] = (means[above] - difference) * np.sqrt(n[above]) / np.sqrt(variance)
    return out


def score(differences: npt.ArrayLike, difference: float) -> float:
    """The score statistic of tasks' differences against a true mean of ``difference`` in (-1, 1)."""
    support, counts = _collect(differences)
    if float(counts @ support) < difference * float(counts.sum()):
        return -float(_scores(-support[::-1], counts[None, ::-1], -difference)[0])
    return float(_scores(support, counts[None], difference)[0])


def interval(differences: npt.ArrayLike, alpha: float) -> tuple[float, float]:
    """Both one-sided limits of the mean difference at ``alpha``."""
    values = np.asarray(differences, float)
    return _lower(values, alpha), -_lower(-values, alpha)


def _lower(differences: Reals, alpha: float) -> float:
    support, counts = _collect(differences)
    z = normal_quantile(1 - alpha)
    low, high = -1.0, float(counts @ support / counts.sum())
    for _ in range(50):
        middle = (low + high) / 2
        if float(_scores(support, counts[None], middle)[0]) > z:
            low = middle
        else:
            high = middle
    return low


def null_distribution(differences: npt.ArrayLike, difference: float) -> tuple[Reals, Reals]:
    """Support and probabilities of the most likely distribution with mean ``difference``, below the seen mean."""
    support, counts = _collect(differences)
    p, _ = _fit(support, counts[None], difference)
    return support, p[0]


def bootstrap_p_value(differences: npt.ArrayLike, difference: float, resamples: int = NULL_RESAMPLES) -> float:
    """Probability of a score as high as the one seen if the most likely distribution with mean ``difference`` were true.

    What the exact unconditional test is for one repeat, this is for several: with few flips the normal quantile is too low.
    Simulated with a fixed key; its own standard error at .05 is .0015. 1 where the mean is not above ``difference``.
    """
    support, counts = _collect(differences)
    n = round(float(counts.sum()))
    seen = score(differences, difference)
    if seen <= 0:
        return 1.0
    _, p = null_distribution(differences, difference)
    rows = generator("null", n).multinomial(n, p / p.sum(), size=resamples).astype(np.float64)
    # A row with the same table as another has the same score.
    tables, times = np.unique(rows, axis=0, return_counts=True)
    high = _scores(support, tables, difference) >= seen - 1e-9
    return float((times[high].sum() + 1) / (resamples + 1))


def bootstrap_interval(differences: npt.ArrayLike, alpha: float) -> tuple[float, float] | None:
    """Cluster bootstrap limits of the mean difference, tasks drawn with all their repeats; None for too few tasks."""
    values = np.asarray(differences, float)
    n = len(values)
    return limits(lambda drawn: drawn @ values / n, n, alpha)
