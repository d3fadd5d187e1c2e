"""Intervals against brute force, tables and their defining property."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.study.bootstrap import bootstrap_interval, estimate, t_interval

values = st.lists(st.integers(-1000, 1000).map(lambda i: i / 1000), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(values)
def test_the_bootstrap_is_that_of_all_resamples(xs: list[float]) -> None:
    means = np.sort([np.mean(draw) for draw in itertools.product(xs, repeat=len(xs))])
    low, high = bootstrap_interval(xs)
    n = len(means)
    assert low == pytest.approx(means[math.ceil(0.025 * n) - 1], abs=1e-12)
    assert high == pytest.approx(means[math.ceil(0.975 * n) - 1], abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.randoms())
def test_the_order_of_seeds_changes_no_bit(xs: list[float], random: object) -> None:
    shuffled = list(xs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert estimate(xs) == estimate(shuffled)


def test_many_values_are_resampled_with_a_fixed_key() -> None:
    xs = np.random.default_rng(0).normal(0.8, 0.1, 30).tolist()
    low, high = bootstrap_interval(xs)
    assert (low, high) == bootstrap_interval(xs[::-1])
    assert high - low == pytest.approx(2 * 1.96 * np.std(xs) / math.sqrt(30), rel=0.05)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    single = estimate([0.5])
    assert single is not None
    assert (single.mean, single.n, single.low, single.t_high) == (0.5, 1, None, None)
    assert estimate([]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_the_t_interval_is_scipys(xs: list[float]) -> None:
    spread = scipy.stats.sem(xs)
    theirs = scipy.stats.t.interval(0.95, len(xs) - 1, np.mean(xs), spread) if spread > 0 else (xs[0], xs[0])
    assert t_interval(xs) == pytest.approx(theirs, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("n", "expected"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (31, 2.042)])
def test_the_t_interval_has_the_quantiles_of_the_tables(n: int, expected: float) -> None:
    xs = [0.0, 1.0, *[0.5] * (n - 2)]
    low, high = t_interval(xs)
    assert (high - low) / 2 / (np.std(xs, ddof=1) / math.sqrt(n)) == pytest.approx(expected, abs=6e-4)


def test_the_t_interval_covers_as_it_says() -> None:
    draws = np.random.default_rng(1).normal(0, 1, (4000, 4))
    inside = np.mean([low <= 0 <= high for low, high in map(t_interval, draws.tolist())])
    assert abs(inside - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)
