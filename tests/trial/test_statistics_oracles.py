"""What scipy and statsmodels have as well, to 1e-9."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.proportion import proportion_confint

from halfbyte.trial.statistics import proportions, tango
from halfbyte.trial.statistics.mcnemar import mcnemar
from halfbyte.trial.statistics.special import binomial_tail, incomplete_beta, normal_quantile, student_quantile

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


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_statsmodels(gains: int, losses: int) -> None:
    theirs = statsmodels_mcnemar([[10, losses], [gains, 10]], exact=True).pvalue if gains + losses else 1.0
    assert mcnemar(gains, losses) == pytest.approx(theirs, abs=1e-9)
    if gains + losses:
        assert mcnemar(gains, losses) == pytest.approx(scipy.stats.binomtest(gains, gains + losses).pvalue, abs=1e-9)
    half = scipy.stats.binom.pmf(gains, gains + losses, 0.5)
    assert mcnemar(gains, losses, mid=True) == pytest.approx(
        min(1.0, 2 * scipy.stats.binom.cdf(min(gains, losses), gains + losses, 0.5) - half), abs=1e-9
    )


def test_mcnemar_mid_p_published() -> None:
    """Complete response before and after consolidation (Cavo et al. 2012; Fagerland et al. 2013): 6 and 16 of 161."""
    assert mcnemar(6, 16, mid=True) == pytest.approx(0.034690, abs=5e-7)


def test_score_at_no_difference_is_mcnemars_chi_square() -> None:
    for gains, losses in ((3, 9), (16, 6), (40, 20)):
        theirs = statsmodels_mcnemar([[10, losses], [gains, 10]], exact=False, correction=False).statistic
        assert tango.score(gains, losses, 200, 0.0) ** 2 == pytest.approx(theirs, abs=1e-9)


def test_lm_eval_3831_unpaired_test_on_paired_outcomes() -> None:
    """220 items: the unpaired z-test says .080, the paired test .008 (counts chosen to have the report's two figures)."""
    n, gains, losses, both = 220, 3, 15, 184
    first, second = (both + losses) / n, (both + gains) / n
    spread = (first * (1 - first) + second * (1 - second)) / n
    unpaired = 2 * scipy.stats.norm.sf((first - second) / spread**0.5)
    assert round(unpaired, 3) == 0.080
    assert round(mcnemar(gains, losses), 3) == 0.008
    low, high = tango.interval(gains, losses, n, 0.025)
    assert low < high < 0  # the paired interval says so too
