"""How many more tasks an undecided trial would have needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from halfbyte.statistics import proportions
from halfbyte.trial import planning
from halfbyte.trial.outcome import Check
from halfbyte.trial.pairs import Pair
from halfbyte.trial.statistics import percentiles

if TYPE_CHECKING:
    from halfbyte.trial.settings import Limits

__all__ = ["more_tasks"]


def more_tasks(checks: Sequence[Check], paired: Mapping[str, Sequence[Pair]], limits: Limits) -> int | None:
    """Tasks beyond these with which all undecided checks could hold; None where tasks do not help one of them."""
    n = len(paired)
    repeats = max(map(len, paired.values()))
    needed = [_tasks_for(check, paired, limits, n, repeats) for check in checks if check.ok is None]
    if not needed or None in needed:
        return None
    return max(1, max(k for k in needed if k is not None) - n)


def _tasks_for(check: Check, paired: Mapping[str, Sequence[Pair]], limits: Limits, n: int, repeats: int) -> int | None:
    """Tasks that one undecided check needs in all; None where its cause is not their number."""
    if check.name == "pass_rate":
        return _for_pass_rate(check, paired, limits, n)
    if check.name == "failure_rate":
        failed, requests = check.details["failed"], check.details["requests"]
        assert isinstance(failed, int)
        assert isinstance(requests, int)
        if limits.failure_rate == 0 or failed / requests >= limits.failure_rate:
            return None
        enough = _for_rate(failed / requests, requests, limits)
        return None if enough is None else -(-enough // repeats)
    if check.name in ("latency_p50", "latency_p95", "latency_limit") and check.estimate is None:
        needed = -(-percentiles.requests_needed(0.5 if check.name == "latency_p50" else 0.95) // repeats)
        return needed if needed > n else None  # enough requests, but too few blocks
    if check.estimate is None or check.low is None or check.high is None or check.limit is None:
        return None
    if check.name == "peak_memory":
        return None
    return _by_width(check.estimate, check.low, check.high, check.limit, check.sense == "at most", n)


def _for_rate(rate: float, requests: int, limits: Limits) -> int | None:
    """Requests at which the upper limit of this rate is low enough."""
    n = requests
    while proportions.upper_limit(round(rate * n), n, limits.alpha) > limits.failure_rate:
        n = int(1.1 * n) + 1
        if n > 10 * planning.MOST:
            return None
    return n


def _by_width(estimate: float, low: float, high: float, limit: float, below: bool, n: int) -> int | None:
    """Tasks at which an interval that narrows with their root would lie on the good side; None if its middle does not."""
    room = limit - estimate if below else estimate - limit
    reach = high - estimate if below else estimate - low
    if room <= 0 or reach <= 0:
        return None
    needed = -(-n * (reach / room) ** 2 // 1)
    return int(needed) if needed <= planning.MOST else None


def _for_pass_rate(check: Check, paired: Mapping[str, Sequence[Pair]], limits: Limits, n: int) -> int | None:
    """Tasks for the power asked if flips stay as frequent: for an equal candidate, or else for one as good as this looks."""
    differences = [
        sum(p.candidate_passed - p.baseline_passed for p in of_task) / len(of_task) for of_task in paired.values()
    ]
    flips = sum(d * d for d in differences) / n
    enough = planning.tasks_for(limits.margin, limits.alpha, flips, limits.power)
    if enough is not None and enough > n:
        return enough
    assert check.estimate is not None
    likely = min(0.0, check.estimate)
    return planning.tasks_for(limits.margin, limits.alpha, max(flips, abs(likely)), limits.power, likely)
