"""What scipy and statsmodels have as well, to 1e-9."""

from __future__ import annotations

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from halfbyte.trial.statistics import tango
from halfbyte.trial.statistics.mcnemar import mcnemar


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
