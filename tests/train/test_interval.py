"""Intervals that stay honest at the ends, and cluster by prompt."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.train.interval import accuracy_interval, wilson


def test_published_example() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, score method without continuity correction.
    low, high = wilson(81, 263)
    assert low == pytest.approx(0.2553, abs=5e-5)
    assert high == pytest.approx(0.3662, abs=5e-5)


def test_no_failures_do_not_give_a_width_of_zero() -> None:
    accuracy, low, high = accuracy_interval([[True]] * 10)
    assert (accuracy, high) == (1.0, 1.0)
    assert low < 0.75
    assert accuracy_interval([]) == (0.0, 0.0, 1.0)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=40))
def test_between_independent_and_fully_dependent_samples(groups: list[list[bool]]) -> None:
    accuracy, low, high = accuracy_interval(groups)
    total = 3 * len(groups)
    narrow, wide = (wilson(accuracy * n, n) for n in (total, len(groups)))
    assert low <= accuracy <= high
    assert wide[0] - 1e-12 <= low <= narrow[0] + 1e-12
    assert narrow[1] - 1e-12 <= high <= wide[1] + 1e-12


def test_coverage_with_clustered_samples() -> None:
    """95% intervals over prompts that are each easy or hard cover the truth about 95% of the time."""
    rng, hits, rounds = random.Random(0), 0, 400
    for _ in range(rounds):
        groups = []
        for _ in range(60):
            p = rng.choice([0.2, 0.8])
            groups.append([rng.random() < p for _ in range(4)])
        _, low, high = accuracy_interval(groups)
        hits += low <= 0.5 <= high
    sd = math.sqrt(0.95 * 0.05 / rounds)
    assert hits / rounds > 0.95 - 4 * sd
