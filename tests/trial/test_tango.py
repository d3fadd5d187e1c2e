"""Tango's interval: published examples, the score test inverted by brute force, and what must hold for any counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfbyte.trial.statistics import tango

tables = st.integers(1, 400).flatmap(
    lambda n: st.integers(0, n).flatmap(lambda b: st.tuples(st.just(b), st.integers(0, n - b), st.just(n)))
)
alphas = st.sampled_from([0.005, 0.025, 0.05, 0.1])


@pytest.mark.parametrize(
    ("gains", "losses", "n", "alpha", "low", "high", "digits"),
    [
        (1, 7, 21, 0.025, -0.517, -0.026, 3),  # Bentur et al. 2009, in Fagerland, Lydersen and Laake 2014
        (6, 16, 161, 0.025, -0.1240, -0.0054, 4),  # Cavo et al. 2012, there
        (28, 25, 618, 0.05, -0.0148, 0.0247, 4),  # as R's PropCIs::scoreci.mp(25, 28, 618, .9) prints it
    ],
)
def test_published_intervals(
    gains: int, losses: int, n: int, alpha: float, low: float, high: float, digits: int
) -> None:
    found = tango.interval(gains, losses, n, alpha)
    assert (round(found[0], digits), round(found[1], digits)) == (low, high)


def test_published_score() -> None:
    """Soft contact lenses (Miyanaga 1994, in Tango 1998): 44 pairs, one loss, margin .1: Z = 1.709, p = .044."""
    z = tango.score(0, 1, 44, -0.1)
    assert round(z, 3) == 1.709
    assert round(float(scipy.stats.norm.sf(z)), 3) == 0.044


def brute_score(gains: int, losses: int, n: int, difference: float) -> float:
    """The statistic with its nuisance found by maximising the likelihood numerically."""
    concordant = n - gains - losses
    least, most = max(0.0, -difference), (1 - difference) / 2

    def unlikely(q: float) -> float:
        return -(
            scipy.special.xlogy(gains, q + difference)
            + scipy.special.xlogy(losses, q)
            + scipy.special.xlogy(concordant, 1 - 2 * q - difference)
        )

    grid = np.linspace(least, most, 2001)
    values = [unlikely(float(q)) for q in grid]
    centre = int(np.nanargmin(values))
    ends = grid[max(0, centre - 1)], grid[min(2000, centre + 1)]
    q = scipy.optimize.minimize_scalar(unlikely, bounds=ends, method="bounded", options={"xatol": 1e-13}).x
    return (gains - losses - n * difference) / math.sqrt(n * (2 * q + difference - difference**2))


@pytest.mark.parametrize(("gains", "losses", "n"), [(0, 0, 10), (3, 7, 40), (0, 5, 30), (12, 1, 60), (9, 9, 20)])
def test_interval_is_the_inverted_score_test(gains: int, losses: int, n: int) -> None:
    z = scipy.stats.norm.ppf(0.95)
    low, high = tango.interval(gains, losses, n, 0.05)
    assert brute_score(gains, losses, n, low) == pytest.approx(z, abs=1e-4)
    assert brute_score(gains, losses, n, high) == pytest.approx(-z, abs=1e-4)
    for inside in np.linspace(low, high, 12)[1:-1]:
        assert abs(brute_score(gains, losses, n, float(inside))) < z


def test_gate_of_mean_and_t_ten_pairs_without_a_flip() -> None:
    """mean +- t * sd / sqrt(n) of ten zeros is (0, 0) and passes any margin; the score limit is 21 points away."""
    differences = np.zeros(10)
    half = scipy.stats.t.ppf(0.95, 9) * differences.std(ddof=1) / math.sqrt(10)
    assert (differences.mean() - half, differences.mean() + half) == (0.0, 0.0)
    z = scipy.stats.norm.ppf(0.95)
    low, high = tango.interval(0, 0, 10, 0.05)
    assert (low, high) == pytest.approx((-(z**2) / (10 + z**2), z**2 / (10 + z**2)), abs=1e-12)
    assert round(low, 2) == -0.21


@settings(deadline=None)
@given(tables, alphas)
def test_symmetric_and_holds_the_estimate(table: tuple[int, int, int], alpha: float) -> None:
    gains, losses, n = table
    low, high = tango.interval(gains, losses, n, alpha)
    assert (-high, -low) == tango.interval(losses, gains, n, alpha)
    assert -1 <= low <= (gains - losses) / n <= high <= 1
    assert low < high


@settings(deadline=None)
@given(tables, alphas)
def test_more_confidence_is_wider(table: tuple[int, int, int], alpha: float) -> None:
    low, high = tango.interval(*table, alpha)
    wider = tango.interval(*table, alpha / 2)
    assert wider[0] <= low
    assert wider[1] >= high


@settings(deadline=None)
@given(tables, alphas)
def test_one_loss_turned_into_a_gain_moves_both_ends_up(table: tuple[int, int, int], alpha: float) -> None:
    gains, losses, n = table
    assume(losses)
    low, high = tango.interval(gains, losses, n, alpha)
    better = tango.interval(gains + 1, losses - 1, n, alpha)
    assert better[0] >= low - 1e-12
    assert better[1] >= high - 1e-12


@settings(deadline=None)
@given(tables, st.floats(-0.98, 0.97), st.floats(0.001, 0.02))
def test_score_falls_with_the_difference(table: tuple[int, int, int], difference: float, step: float) -> None:
    assert tango.score(*table, difference) >= tango.score(*table, difference + step) - 1e-9


@pytest.mark.parametrize("table", [(-1, 0, 5), (3, 3, 5), (0, 0, 0)])
def test_impossible_counts(table: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        tango.interval(*table, 0.05)


@pytest.mark.parametrize("flips", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("n", [30, 60])
def test_coverage_by_enumeration(n: int, flips: float) -> None:
    """A two-sided 90% interval covers the truth at least 87% of the time here, with equal arms (exact sum over tables)."""
    covered = 0.0
    for gains in range(n + 1):
        for losses in range(n + 1 - gains):
            chance = scipy.stats.multinomial.pmf([gains, losses, n - gains - losses], n, [flips / 2, flips / 2, 1 - flips])
            if chance > 1e-9:
                low, high = tango.interval(gains, losses, n, 0.05)
                covered += chance * (low <= 0 <= high)
    assert covered > 0.87
