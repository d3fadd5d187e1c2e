"""Costs per request and passed task, and the day that pays for the set-up, against figures worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trial_records import cost, run, table, usage

from halfbyte.trial.cost import GIB, CostComparison, compare_costs
from halfbyte.trial.pairs import blocks
from halfbyte.trial.records import Arm


def served(baseline: float = 2.0, candidate: float = 1.0, n: int = 100, failing: int = 0) -> Any:
    """Each request takes so many seconds, one after the other; the candidate fails some tasks."""

    def outcome(arm: Arm, task: int, repeat: int) -> dict[str, Any]:
        lost = arm == "candidate" and task < failing
        return {"latency": baseline if arm == "baseline" else candidate, "passed": not lost}

    return run(outcome, n, gap=0.0)


def test_per_request_and_per_passed() -> None:
    """3.6 an hour is .001 a second: 2 s and 1 s a request are 2 and 1 per 1000; 80 of 100 pass: 1.25 a thousand passed."""
    found = compare_costs(served(failing=20), usage(), cost(machine_per_hour=3.6))
    assert (found.baseline.serving_per_1k, found.candidate.serving_per_1k) == pytest.approx((2.0, 1.0))
    assert (found.baseline.seconds, found.candidate.seconds) == pytest.approx((200.0, 100.0))
    assert (found.baseline.passed, found.candidate.passed) == (100, 80)
    assert found.candidate.per_passed == pytest.approx(1.25e-3)
    assert found.baseline.per_passed == pytest.approx(2e-3)
    assert CostComparison.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_set_up_and_upkeep_are_spread_over_requests() -> None:
    """Set-up of 600 over 12 months of 10000 requests is 5 per 1000; upkeep of 30 a month is 3."""
    prices = cost(
        machine_per_hour=3.6, setup_hours=6, engineer_per_hour=100, operating_per_month=30, requests_per_month=1e4
    )
    found = compare_costs(served(), usage(), prices)
    c = found.candidate
    assert (c.serving_per_1k, c.setup_per_1k, c.operating_per_1k, c.per_1k) == pytest.approx((1.0, 5.0, 3.0, 9.0))
    assert (found.baseline.setup_per_1k, found.baseline.operating_per_1k, found.baseline.per_1k) == (
        0.0,
        0.0,
        pytest.approx(2),
    )
    assert (found.breaks_even, found.break_even_days) == (False, None)  # saves 10 a month, upkeep is 30
    assert found.note.startswith("never")


def test_break_even_day() -> None:
    """A saving of 1 per 1000 at 1e6 a month is 1000, less 500 upkeep; set-up of 1000 is paid in two months."""
    prices = cost(
        machine_per_hour=3.6, setup_hours=10, engineer_per_hour=100, operating_per_month=500, requests_per_month=1e6
    )
    found = compare_costs(served(), usage(), prices)
    assert found.saving_per_month == pytest.approx(500)
    assert found.breaks_even is True
    assert found.break_even_days == pytest.approx(2 * 365.25 / 12)
    late = compare_costs(served(), usage(), prices.model_copy(update={"horizon_months": 1.0}))
    assert "beyond the horizon" in late.note


def test_no_set_up_breaks_even_at_once() -> None:
    assert compare_costs(served(), usage(), cost(machine_per_hour=3.6)).break_even_days == 0.0


def test_price_by_memory() -> None:
    """A quarter and an eighth of the machine's memory, at the same speed: half the cost. Unknown peaks have no price."""
    prices = cost(machine_per_hour=3.6, price_by="memory", machine_memory_gib=80)
    found = compare_costs(served(1.0, 1.0), usage(20 * GIB, 10 * GIB), prices)
    assert (found.baseline.serving_per_1k, found.candidate.serving_per_1k) == pytest.approx((0.25, 0.125))
    remote = compare_costs(served(), usage(20 * GIB, None), prices)
    assert (remote.candidate.per_1k, remote.breaks_even) == (None, None)


def test_idle_time_is_paid() -> None:
    found = compare_costs(served(), usage(), cost(machine_per_hour=3.6, utilisation=0.25))
    assert found.baseline.serving_per_1k == pytest.approx(8.0)


def test_without_requests_nothing_can_be_spread() -> None:
    prices = cost(machine_per_hour=3.6, setup_hours=1, engineer_per_hour=100, requests_per_month=0)
    found = compare_costs(served(), usage(), prices)
    assert (found.candidate.setup_per_1k, found.candidate.per_1k, found.breaks_even) == (None, None, None)
    assert found.candidate.serving_per_1k == pytest.approx(1.0)


def test_nothing_passed_has_no_price_per_pass() -> None:
    assert compare_costs(served(failing=100), usage(), cost()).candidate.per_passed is None


def test_seconds_are_those_with_a_request_in_flight() -> None:
    """Requests in flight at once take the time of one, and the pauses between an arm's segments none."""
    records = []
    for record in table(0, 0, 32, latency=2.0):
        segment = record.position // 2
        records.append(record.__class__(**{**record.to_json(), "started": 1000.0 * record.block + 10.0 * segment}))
    for block in blocks(records):
        assert block.seconds == {"baseline": 4.0, "candidate": 4.0}
