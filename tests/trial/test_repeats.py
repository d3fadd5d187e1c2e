"""Tasks with repeats: the score test that is Tango's at one repeat, and the bootstraps over tasks."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.trial.checks.quality import non_inferiority
from halfbyte.trial.statistics import repeats, tango

Z = scipy.stats.norm.ppf(0.95)


def differences(gains: int, losses: int, n: int) -> np.ndarray:
    return np.array([1.0] * gains + [-1.0] * losses + [0.0] * (n - gains - losses))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.data())
def test_one_repeat_is_tango(n: int, data: st.DataObject) -> None:
    gains = data.draw(st.integers(0, n))
    losses = data.draw(st.integers(0, n - gains))
    values = differences(gains, losses, n)
    # abs: where all pairs are gains (or losses) the end is -1 or 1 and the search ends within 2^-49 of it.
    assert repeats.interval(values, 0.05) == pytest.approx(tango.interval(gains, losses, n, 0.05), abs=1e-9)
    for difference in (-0.3, -0.05, 0.1):
        seen = tango.score(gains, losses, n, difference)
        if np.isfinite(seen):
            assert repeats.score(values, difference) == pytest.approx(seen, rel=1e-6, abs=1e-6)


def test_constrained_distribution_is_the_likeliest() -> None:
    """Against a general optimiser, with the bottom of the scale unseen and needed, and without."""
    for values, difference in (
        ([0.0, 0.0, 0.25, -0.25, 0.5, 0.0], -0.2),
        ([0.0] * 7 + [-0.5], -0.4),
        ([-1.0, 0.5, 0.0], -0.3),
    ):
        support, p = repeats.null_distribution(values, difference)
        counts = np.array([np.isclose(values, v).sum() for v in support], float)

        def unlikely(q: np.ndarray, counts: np.ndarray = counts) -> float:
            return -float((counts * np.log(np.maximum(q, 1e-12))).sum())

        best = scipy.optimize.minimize(
            unlikely,
            np.full(len(support), 1 / len(support)),
            bounds=[(0, 1)] * len(support),
            constraints=[
                {"type": "eq", "fun": lambda q: q.sum() - 1},
                {"type": "eq", "fun": lambda q, s=support, d=difference: q @ s - d},
            ],
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 1000},
        )
        assert p.sum() == pytest.approx(1, abs=1e-9)
        assert p @ support == pytest.approx(difference, abs=1e-9)
        assert unlikely(p) <= best.fun + 1e-6


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=80))
def test_symmetric_and_holds_the_mean(quarters: list[int]) -> None:
    values = np.array(quarters) / 4
    low, high = repeats.interval(values, 0.05)
    mirrored = repeats.interval(-values, 0.05)
    assert (low, high) == pytest.approx((-mirrored[1], -mirrored[0]), abs=1e-9)
    assert -1 <= low <= values.mean() + 1e-12
    assert values.mean() - 1e-12 <= high <= 1


def test_repeats_without_a_flip_say_no_more_than_the_tasks() -> None:
    """Ten tasks asked a hundred times without a flip: the limit of ten pairs, where a bootstrap says 0."""
    outcomes = [[(True, True)] * 100] * 10
    check = non_inferiority("pass_rate", outcomes, 0.05, 0.05)
    assert check.ok is None
    assert check.details["tango_low"] == pytest.approx(-(Z**2) / (10 + Z**2), abs=1e-9)
    values = np.zeros(10)
    assert repeats.bootstrap_interval(values, 0.05) == (0.0, 0.0)
    assert repeats.interval(values, 0.05)[0] == pytest.approx(-(Z**2) / (10 + Z**2), abs=1e-9)


def test_repeats_narrow_what_is_noise() -> None:
    """The same chances, more repeats: nearer to the truth."""
    random = np.random.default_rng(0)
    p = random.uniform(0, 1, 100)[:, None]
    widths = []
    for k in (1, 4, 16):
        values = (random.random((100, k)) < p).mean(axis=1) - (random.random((100, k)) < p).mean(axis=1)
        low, high = repeats.interval(values, 0.05)
        widths.append(high - low)
    assert widths[0] > 1.5 * widths[1] > 2 * widths[2]


def test_bootstrap_p_value_is_the_exact_one_without_a_flip() -> None:
    """No flip in n tasks: the likeliest null is a loss with chance m, so p = (1 - m)^n."""
    for n, margin in ((40, 0.05), (59, 0.05), (20, 0.2)):
        found = repeats.bootstrap_p_value(np.zeros(n), -margin)
        assert found == pytest.approx((1 - margin) ** n, abs=4 * np.sqrt(0.25 / repeats.NULL_RESAMPLES))


def test_same_tasks_in_another_order_are_the_same() -> None:
    values = np.random.default_rng(1).integers(-4, 5, 50) / 4
    assert repeats.bootstrap_p_value(values, -0.3) == repeats.bootstrap_p_value(values[::-1], -0.3)
    assert repeats.interval(values, 0.05) == repeats.interval(values[::-1], 0.05)


def at_margin(kind: str, random: np.random.Generator, n: int, k: int, margin: float) -> np.ndarray:
    """Differences of n tasks with k repeats whose true mean is -margin."""
    if kind == "few tasks lost for good":
        return -(random.random(n) < margin).astype(float)
    if kind == "every task a little worse":
        p = random.uniform(margin, 1, n)[:, None]
        return (random.random((n, k)) < p - margin).mean(axis=1) - (random.random((n, k)) < p).mean(axis=1)
    hit = random.random(n) < 2 * margin
    return (random.random((n, k)) < np.where(hit, 0.5, 1.0)[:, None]).mean(axis=1) - 1


def passes(values: np.ndarray, margin: float) -> bool:
    """The rule of ``non_inferiority`` on differences alone, cheapest part first."""
    if repeats.score(values, -margin) <= Z:
        return False
    drawn = repeats.bootstrap_interval(values, 0.05)
    return drawn is not None and drawn[0] > -margin and repeats.bootstrap_p_value(values, -margin) <= 0.05


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["few tasks lost for good", "every task a little worse", "half of the repeats lost"])
@pytest.mark.parametrize(("n", "k", "margin"), [(30, 2, 0.1), (60, 4, 0.05), (60, 4, 0.1), (200, 3, 0.05)])
def test_type_one_error_with_repeats(kind: str, n: int, k: int, margin: float) -> None:
    """2000 trials at the margin: at most 6% pass, plus twice the simulation's own error."""
    random = np.random.default_rng(5)
    kept = sum(passes(at_margin(kind, random, n, k, margin), margin) for _ in range(2000))
    print(f"{kind}, {n} tasks, {k} repeats, margin {margin}: {kept} of 2000 pass")
    assert kept / 2000 <= 0.06 + 2 * np.sqrt(0.06 * 0.94 / 2000)
