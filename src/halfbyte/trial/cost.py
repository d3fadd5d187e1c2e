"""What serving costs: per 1000 requests and per passed task, set-up and upkeep spread over requests, and the break-even day.

Serving is the time with a request of an arm in flight, at the trial's load, priced by the hour: the whole machine, or the share
of its memory that the arm's peak takes where others use the rest. Set-up is spread evenly over the requests of the horizon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfbyte.trial.pairs import Block, blocks
from halfbyte.trial.records import Arm, ArmUsage, Record, Strict

if TYPE_CHECKING:
    from halfbyte.trial.settings import Cost

__all__ = ["ArmCost", "CostComparison", "compare_costs", "extra_per_request", "price_per_second"]

DAYS_PER_MONTH = 365.25 / 12
GIB = 2**30


@dataclass(frozen=True)
class ArmCost(Strict):
    """Cost of one arm, in the settings' currency.

    Arguments:
        requests, passed: in the trial; passed by the scorer.
        seconds: wall time with a request of the arm in flight.
        serving_per_1k: machine, per 1000 requests; None where the price needs a peak that nobody knows.
        setup_per_1k, operating_per_1k: spread over requests; None where requests_per_month is 0 but there is something to
            spread. 0 for the baseline.
        per_1k: the three together.
        per_passed: per passed task, the three together; None also where none passed.
    """

    arm: Arm
    requests: int
    passed: int
    seconds: float
    serving_per_1k: float | None
    setup_per_1k: float | None
    operating_per_1k: float | None
    per_1k: float | None
    per_passed: float | None


@dataclass(frozen=True)
class CostComparison(Strict):
    """Both arms.

    Arguments:
        setup: once, for the candidate.
        saving_per_month: serving saved less the candidate's upkeep; None where it cannot be known.
        break_even_days: until the saving has paid for the set-up; None with ``breaks_even`` False: never.
        breaks_even: None where it cannot be known.
        note: in a sentence.
    """

    currency: str
    baseline: ArmCost
    candidate: ArmCost
    setup: float
    saving_per_month: float | None
    break_even_days: float | None
    breaks_even: bool | None
    note: str


def price_per_second(cost: Cost, usage: ArmUsage | None) -> float | None:
    """What a second of serving costs; None where it goes by memory and the peak is not known."""
    second = cost.machine_per_hour / 3600 / cost.utilisation
    if cost.price_by == "machine":
        return second
    if usage is None or usage.peak_bytes is None or cost.machine_memory_gib is None:
        return None
    return second * min(1.0, usage.peak_bytes / (cost.machine_memory_gib * GIB))


def setup_cost(cost: Cost) -> float:
    """Once, for the candidate."""
    return cost.setup_hours * cost.engineer_per_hour


def extra_per_request(cost: Cost) -> tuple[float | None, float | None]:
    """Set-up and upkeep of the candidate per request; None where there are no requests to spread them over."""

    def spread(amount: float, months: float) -> float | None:
        if amount == 0:
            return 0.0
        requests = cost.requests_per_month * months
        return amount / requests if requests > 0 else None

    return spread(setup_cost(cost), cost.horizon_months), spread(cost.operating_per_month, 1.0)


def compare_costs(records: Sequence[Record], usage: Mapping[Arm, ArmUsage], cost: Cost) -> CostComparison:
    """Costs of both arms and the break-even day, from the records' own clock."""
    served = blocks(records)
    baseline = _arm("baseline", served, usage.get("baseline"), cost)
    candidate = _arm("candidate", served, usage.get("candidate"), cost)
    once = setup_cost(cost)
    if baseline.serving_per_1k is None or candidate.serving_per_1k is None:
        return CostComparison(
            cost.currency,
            baseline,
            candidate,
            once,
            None,
            None,
            None,
            "the price goes by memory, and a peak is not known",
        )
    if cost.requests_per_month == 0:
        note = "requests_per_month is 0: nothing to save on"
        return CostComparison(cost.currency, baseline, candidate, once, None, None, None, note)
    serving = (baseline.serving_per_1k - candidate.serving_per_1k) * cost.requests_per_month / 1000
    saving = serving - cost.operating_per_month
    if saving <= 0:
        note = f"never: serving saves {serving:.4g} a month, and upkeep takes {cost.operating_per_month:.4g}"
        return CostComparison(cost.currency, baseline, candidate, once, saving, None, False, note)
    days = once / saving * DAYS_PER_MONTH
    note = f"day {days:.1f}: set-up of {once:.4g} over a saving of {saving:.4g} a month"
    if days > cost.horizon_months * DAYS_PER_MONTH:
        note += f", beyond the horizon of {cost.horizon_months:g} months"
    return CostComparison(cost.currency, baseline, candidate, once, saving, days, True, note)


def _arm(arm: Arm, served: Sequence[Block], usage: ArmUsage | None, cost: Cost) -> ArmCost:
    requests = sum(len(block.records[arm]) for block in served)
    passed = sum(record.passed is True for block in served for record in block.records[arm])
    seconds = sum(block.seconds[arm] for block in served)
    price = price_per_second(cost, usage)
    setup, operating = extra_per_request(cost) if arm == "candidate" else (0.0, 0.0)
    serving = None if price is None or not requests else price * seconds / requests
    parts = (serving, setup, operating)
    total = None if None in parts else sum(part for part in parts if part is not None)
    return ArmCost(
        arm=arm,
        requests=requests,
        passed=passed,
        seconds=seconds,
        serving_per_1k=None if serving is None else 1000 * serving,
        setup_per_1k=None if setup is None else 1000 * setup,
        operating_per_1k=None if operating is None else 1000 * operating,
        per_1k=None if total is None else 1000 * total,
        per_passed=None if total is None or not passed else total * requests / passed,
    )
