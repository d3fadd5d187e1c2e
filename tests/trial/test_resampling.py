"""Bootstrap limits over blocks, and percentiles that a sample cannot carry."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.trial.statistics import percentiles, resample

E = ["baseline", "candidate"]


def test_fewest_clusters() -> None:
    """With k clusters the chance that all lie on one side of the truth is 2^-k."""
    assert [resample.least_clusters(alpha) for alpha in (0.5, 0.1, 0.05, 0.025, 0.01)] == [2, 4, 5, 6, 7]
    assert resample.limits(lambda drawn: drawn[:, 0], 4, 0.05) is None
    assert resample.limits(lambda drawn: drawn[:, 0], 5, 0.05) is not None


def test_expanded_tail_is_student_over_normal() -> None:
    for k in (5, 8, 30):
        expected = scipy.stats.norm.cdf(-np.sqrt(k / (k - 1)) * scipy.stats.t.ppf(0.95, k - 1))
        assert resample.expanded_tail(0.05, k) == pytest.approx(expected, abs=1e-9)
    assert resample.expanded_tail(0.05, 5) < 0.01
    assert resample.expanded_tail(0.05, 10_000) == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize("k", [6, 10])
def test_limits_of_a_mean_of_few_blocks_hold(k: int) -> None:
    """One-sided 95% limits of the mean of k normal blocks miss at most 6% of the time (plain percentiles: 9% at k = 6)."""
    random = np.random.default_rng(0)
    missed = plain = 0
    for _ in range(600):
        values = random.normal(size=k)
        low, _ = resample.limits(lambda drawn, v=values: drawn @ v / k, k, 0.05)  # type: ignore[misc]
        missed += low > 0
        means = np.sort(np.concatenate([chunk @ values / k for chunk in resample.draws(k)]))
        plain += means[int(0.05 * len(means))] > 0
    assert missed / 600 <= 0.07
    assert plain > missed


def test_draws_are_the_same_every_time() -> None:
    first = np.concatenate(resample.draws(9))
    resample.draws.cache_clear()
    assert np.array_equal(first, np.concatenate(resample.draws(9)))
    assert first.shape == (resample.RESAMPLES, 9)
    assert np.all(first.sum(axis=1) == 9)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=60), st.sampled_from([0.05, 0.5, 0.9, 0.95, 0.99]))
def test_percentile_is_numpys_inverted_distribution(values: list[float], q: float) -> None:
    assert percentiles.percentile(values, q) == np.percentile(values, 100 * q, method="inverted_cdf")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), min_size=2, max_size=6), st.data())
def test_weighted_percentile_is_that_of_the_drawn_blocks(blocks: list[list[float]], data: st.DataObject) -> None:
    q = data.draw(st.sampled_from([0.5, 0.9, 0.95]))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(blocks), max_size=len(blocks)).filter(any))
    drawn = [value for block, times in zip(blocks, counts, strict=True) for value in block * times]
    found = percentiles._Weighted(blocks, q)(np.array([counts], float))
    assert found[0] == percentiles.percentile(drawn, q)


def test_requests_that_carry_a_percentile() -> None:
    assert [percentiles.requests_needed(q) for q in (0.5, 0.9, 0.95, 0.99)] == [20, 100, 200, 1000]


def test_a_ratio_that_is_the_same_in_every_block_has_no_spread() -> None:
    random = np.random.default_rng(2)
    baseline = [random.lognormal(size=30) for _ in range(8)]
    found = percentiles.ratio_limits(baseline, [1.25 * block for block in baseline], 0.5, 0.05)
    assert found == pytest.approx((1.25, 1.25), rel=1e-12)


def test_pairing_takes_out_what_a_block_shares() -> None:
    """Blocks ten times slower than others widen unpaired limits, not the paired ratio's."""
    random = np.random.default_rng(4)
    mood = 10 ** random.uniform(0, 1, 10)
    baseline = [m * random.lognormal(0, 0.1, 40) for m in mood]
    candidate = [m * random.lognormal(0, 0.1, 40) for m in mood]
    low, high = percentiles.ratio_limits(baseline, candidate, 0.5, 0.05)  # type: ignore[misc]
    alone = percentiles.value_limits(candidate, 0.5, 0.05)
    assert alone is not None
    assert high / low < 0.5 * alone[1] / alone[0]
    assert low < 1 < high


@pytest.mark.heavy
def test_latency_limits_cover() -> None:
    """p50 and p95 ratios of equal arms in 8 blocks of 30: 95% upper limits lie below 1 at most 7% of the time."""
    random = np.random.default_rng(6)
    below = dict.fromkeys((0.5, 0.95), 0)
    for _ in range(400):
        mood = random.lognormal(0, 0.3, 8)
        arms = [[m * random.lognormal(0, 0.5, 30) for m in mood] for _ in E]
        for q in below:
            found = percentiles.ratio_limits(arms[0], arms[1], q, 0.05)
            assert found is not None
            below[q] += found[1] < 1
    assert max(below.values()) / 400 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400), below
