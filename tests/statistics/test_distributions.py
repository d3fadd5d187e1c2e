"""Distribution functions and limits of a proportion: what scipy and statsmodels have as well, to 1e-9, and what defines them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.proportion import proportion_confint

from halfbyte.statistics import proportions
from halfbyte.statistics.special import binomial_tail, incomplete_beta, normal_quantile, student_quantile

counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
alphas = st.floats(0.001, 0.3)


def test_incomplete_beta_is_scipys() -> None:
    random = np.random.default_rng(3)
    a, b = random.integers(1, 3000, (2, 20_000)).astype(float)
    for x in (random.random(20_000), np.clip(random.normal(a / (a + b), 0.02), 0, 1)):
        ours, theirs = incomplete_beta(a, b, x), scipy.special.betainc(a, b, x)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
        large = theirs > 1e-20
        np.testing.assert_allclose(ours[large], theirs[large], rtol=1e-9)


@settings(deadline=None, max_examples=50)
@given(counts, st.floats(0, 1))
def test_binomial_tail_is_scipys(count: tuple[int, int], p: float) -> None:
    k, n = count
    assert float(binomial_tail(k, n, p)) == pytest.approx(scipy.stats.binom.sf(k - 1, n, p), abs=1e-10)


def test_binomial_tail_beyond_its_range() -> None:
    assert binomial_tail([0, 3, 4, -1], [3, 3, 3, 0], [0.5, 1.0, 1.0, 0.2]).tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 200])
@pytest.mark.parametrize("probability", [0.6, 0.95, 0.975, 0.995, 0.01])
def test_student_quantile_is_scipys(probability: float, freedom: int) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(scipy.stats.t.ppf(probability, freedom), rel=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-6, 1 - 1e-6))
def test_normal_quantile_is_scipys(probability: float) -> None:
    assert normal_quantile(probability) == pytest.approx(scipy.stats.norm.ppf(probability), abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(counts, alphas)
def test_clopper_pearson_is_statsmodels(count: tuple[int, int], alpha: float) -> None:
    k, n = count
    low, high = proportion_confint(k, n, alpha=2 * alpha, method="beta")
    assert proportions.lower_limit(k, n, alpha) == pytest.approx(low, abs=1e-9)
    assert proportions.upper_limit(k, n, alpha) == pytest.approx(high, abs=1e-9)
    exact = scipy.stats.binomtest(k, n).proportion_ci(1 - 2 * alpha, method="exact")
    assert proportions.upper_limit(k, n, alpha) == pytest.approx(exact.high, abs=1e-9)


@pytest.mark.parametrize("n", [1000, 1100, 5000, 100_000])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 1.0])
def test_limits_of_thousands(n: int, share: float) -> None:
    """Where binomial coefficients are no longer floats."""
    k = round(share * n)
    theirs = scipy.stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    assert proportions.interval(k, n, 0.025) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_binomial_limits_have_the_tails_that_define_them(n: int) -> None:
    def below(k: int, p: float) -> float:
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    for k in range(n + 1):
        low, high = proportions.interval(k, n, 0.025)
        assert low == 0 if k == 0 else 1 - below(k - 1, low) == pytest.approx(0.025, abs=1e-9)
        assert high == 1 if k == n else below(k, high) == pytest.approx(0.025, abs=1e-9)


def test_five_runs_without_a_collapse_say_little() -> None:
    assert proportions.interval(0, 5, 0.025) == (0.0, pytest.approx(0.522, abs=1e-3))
    assert proportions.interval(0, 0, 0.025) == (0.0, 1.0)
