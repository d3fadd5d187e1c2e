"""Tasks that limits need: the power promised is the power of the test that decides."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trial_records import limits

from halfbyte.errors import ConfigError
from halfbyte.trial import planning
from halfbyte.trial.checks.quality import non_inferiority
from halfbyte.trial.planning import Plan, tasks_needed


def test_table_is_the_plan() -> None:
    """What `plan` prints is the table of exact powers, the planned size among them; every row is enumerated again."""
    plan = tasks_needed(limits(failure_rate=1.0), 0.0)
    assert plan.tasks is not None
    rows = {(row.tasks, row.flips): row.power for row in plan.table}
    assert rows[plan.tasks, plan.flips] == plan.power
    assert plan.power is not None
    assert plan.power >= 0.8
    for (n, flips), power in rows.items():
        assert power == planning.pass_power(n, plan.margin, plan.alpha, flips)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(("n", "flips", "margin"), [(60, 0.1, 0.1), (80, 0.05, 0.05)])
def test_power_is_what_trials_reach(n: int, flips: float, margin: float) -> None:
    """200 simulated trials of an equal candidate, decided one by one."""
    random = np.random.default_rng(7)
    passed = 0
    for _ in range(200):
        gains, losses, same = random.multinomial(n, [flips / 2, flips / 2, 1 - flips])
        outcomes = [[(False, True)]] * gains + [[(True, False)]] * losses + [[(True, True)]] * same
        passed += non_inferiority("pass_rate", outcomes, margin, 0.05).ok is True
    power = planning.pass_power(n, margin, 0.05, flips)
    assert passed / 200 == pytest.approx(power, abs=4 * np.sqrt(power * (1 - power) / 200))


@settings(deadline=None, max_examples=12)
@given(st.sampled_from([0.05, 0.1, 0.2]), st.sampled_from([0.0, 0.03, 0.1, 0.3]), st.sampled_from([0.7, 0.8, 0.9]))
def test_planned_tasks_reach_the_power_and_fewer_do_not(margin: float, flips: float, power: float) -> None:
    n = planning.tasks_for(margin, 0.05, flips, power)
    assert n is not None
    for more in range(planning.TEETH):
        assert planning.pass_power(n + more, margin, 0.05, flips) >= power
    assert min(planning.pass_power(k, margin, 0.05, flips) for k in range(max(1, n - planning.TEETH), n)) < power


def test_no_flips_need_the_tasks_of_the_exact_limit() -> None:
    """Without flips 59 tasks show a margin of 5 points: .95^59 = 4.85%, .95^58 = 5.1%."""
    assert planning.tasks_for(0.05, 0.05, 0.0, 0.8) == 59
    assert planning.tasks_for(0.05, 0.05, 0.0, 0.99) == 59


def test_repeats_average_out_noise_and_not_what_lasts() -> None:
    noise = [tasks_needed(limits(failure_rate=1.0), 0.2, k, systematic=0.02).flips for k in (1, 4, 100)]
    assert noise == [pytest.approx(0.22), pytest.approx(0.07), pytest.approx(0.022)]
    sizes = [tasks_needed(limits(failure_rate=1.0, margin=0.1), 0.2, k, systematic=0.02).tasks for k in (1, 4, 100)]
    assert None not in sizes
    assert sizes[0] > sizes[1] > sizes[2]  # type: ignore[operator]


@pytest.mark.heavy
def test_planned_power_with_repeats_is_reached() -> None:
    """The variance-matched pairs of the plan, against trials with repeats decided one by one."""
    random = np.random.default_rng(3)
    k, n, margin = 3, 100, 0.1
    p = 0.5 * (1 + np.sqrt(1 - 2 * 0.24))  # two draws of one task differ with chance 2 p (1 - p) = .24
    passed = 0
    for _ in range(400):
        arms = random.random((2, n, k)) < p
        outcomes = [[(bool(b), bool(c)) for b, c in zip(*task)] for task in zip(*arms)]
        passed += non_inferiority("pass_rate", outcomes, margin, 0.05).ok is True
    planned = planning.pass_power(n, margin, 0.05, 0.24 / k)
    assert passed / 400 == pytest.approx(planned, abs=0.08)


@pytest.mark.parametrize(
    ("changed", "name", "tasks"),
    [
        ({"failure_rate": 0.01}, "failure_rate", 299),
        ({"failure_rate": 0.0}, "failure_rate", None),
        ({"latency_p95_ratio": 1.5}, "latency_p95", 200),
        ({"latency_p50_ratio": 1.5}, "latency_p50", 20),
        ({"tool_parse_drop": 0.05}, "tool_parse", 59),
        ({"benefit": "throughput", "latency_limit": 2.0}, "latency_limit", 200),
    ],
)
def test_other_limits_have_needs_of_their_own(changed: dict[str, Any], name: str, tasks: int | None) -> None:
    plan = tasks_needed(limits(**({"failure_rate": 1.0, "margin": 0.2} | changed)), 0.0)
    need = next(need for need in plan.needs if need.limit == name)
    assert need.tasks == tasks
    assert (plan.tasks is None) == (tasks is None)
    assert plan.tasks is None or plan.tasks >= need.tasks  # type: ignore[operator]


def test_repeats_count_as_requests_for_percentiles() -> None:
    plan = tasks_needed(limits(failure_rate=1.0, margin=0.2, latency_p95_ratio=1.5), 0.0, 4)
    assert next(need for need in plan.needs if need.limit == "latency_p95").tasks == 50
    assert plan.tasks is not None
    assert plan.requests == 4 * plan.tasks


def test_a_margin_beyond_all_tasks_is_said() -> None:
    plan = tasks_needed(limits(margin=0.001, failure_rate=1.0), 0.3)
    assert (plan.tasks, plan.requests, plan.power) == (None, None, None)
    assert "more than 20,000 tasks" in plan.needs[0].why


@pytest.mark.parametrize(
    "given_", [{"discordance": -0.1}, {"discordance": 1.5}, {"repeats": 0}, {"power": 0.2}, {"systematic": 2.0}]
)
def test_impossible_questions(given_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        tasks_needed(limits(), **({"discordance": 0.1} | given_))
