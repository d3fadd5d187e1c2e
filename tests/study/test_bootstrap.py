"""Intervals against brute force, tables and their defining property."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.study.bootstrap import binomial_interval, bootstrap_interval, estimate, t_interval, t_quantile

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


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)]
)
def test_t_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=6e-4)


def test_the_t_interval_covers_as_it_says() -> None:
    draws = np.random.default_rng(1).normal(0, 1, (4000, 4))
    inside = np.mean([low <= 0 <= high for low, high in map(t_interval, draws.tolist())])
    assert abs(inside - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_binomial_limits_have_the_tails_that_define_them(n: int) -> None:
    def below(k: int, p: float) -> float:
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    for k in range(n + 1):
        low, high = binomial_interval(k, n)
        assert low == 0 if k == 0 else 1 - below(k - 1, low) == pytest.approx(0.025, abs=1e-9)
        assert high == 1 if k == n else below(k, high) == pytest.approx(0.025, abs=1e-9)


def test_five_runs_without_a_collapse_say_little() -> None:
    assert binomial_interval(0, 5) == (0.0, pytest.approx(0.522, abs=1e-3))
    assert binomial_interval(0, 0) == (0.0, 1.0)
