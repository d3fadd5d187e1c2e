"""How many tasks the limits need, before any cost: exact power of the very test that decides.

The power is that of a candidate as good as the baseline: flips go both ways alike. It is summed over all tables that pass
(:func:`halfbyte.trial.statistics.unconditional.least_gains`), no normal approximation. Flips have two sources: sampling
noise, which the A/A pilot shows and repeats of a task average out, and lasting differences of the candidate, which they do
not. With repeats a task's difference has the variance of a single pair that flips with probability
``systematic + noise / repeats``, and the power is that of such pairs (ours; exact for one repeat).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from halfbyte.errors import ConfigError
from halfbyte.statistics import proportions
from halfbyte.statistics.special import normal_quantile
from halfbyte.trial.records import Strict
from halfbyte.trial.statistics import percentiles, resample, unconditional

if TYPE_CHECKING:
    from halfbyte.trial.settings import Limits

__all__ = ["SYSTEMATIC", "Need", "Plan", "PowerRow", "pass_power", "power_table", "tasks_for", "tasks_needed"]

#: Share of tasks whose verdict a change of precision flips for good, where nothing is known. An assumption.
SYSTEMATIC = 0.05
#: More tasks than anybody will write; beyond, the margin is too small for a trial.
MOST = 20_000
#: The power of n tasks goes up in saw teeth; a plan holds for so many more tasks as well.
TEETH = 6

FLIPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
SIZES = (30, 50, 100, 150, 200, 300, 500, 1000)


@dataclass(frozen=True)
class Need(Strict):
    """What one limit needs. ``tasks`` is None where no number of tasks is enough."""

    limit: str
    tasks: int | None
    why: str


@dataclass(frozen=True)
class PowerRow(Strict):
    """Probability that the pass-rate limit holds for an equal candidate."""

    tasks: int
    flips: float
    power: float


@dataclass(frozen=True)
class Plan(Strict):
    """Tasks for a trial.

    Arguments:
        tasks: that every limit needs; None where one cannot be met by tasks.
        requests: per arm.
        power: of the pass-rate limit at that number of tasks.
        noise, systematic, flips: share of pairs that flip by sampling, for good, and per task with repeats.
        needs: by limit.
        table: power over tasks and flips.
        notes: the assumptions, in sentences.
    """

    tasks: int | None
    requests: int | None
    power: float | None
    repeats: int
    margin: float
    alpha: float
    noise: float
    systematic: float
    flips: float
    needs: tuple[Need, ...]
    table: tuple[PowerRow, ...]
    notes: tuple[str, ...]


def pass_power(tasks: int, margin: float, alpha: float, flips: float, difference: float = 0.0) -> float:
    """Probability that ``tasks`` pairs hold the margin, at a true difference and a share of flips of at least its size."""
    region = unconditional.least_gains(tasks, margin, alpha)
    return float(unconditional.pass_probability(region, tasks, difference, max(flips, abs(difference)))[0])


@lru_cache(maxsize=256)
def tasks_for(margin: float, alpha: float, flips: float, power: float, difference: float = 0.0) -> int | None:
    """Tasks from which (and from the next few on) the power is reached; None beyond ``MOST``."""

    def reached(n: int) -> bool:
        return pass_power(n, margin, alpha, flips, difference) >= power

    if margin + difference <= 0:
        return None
    spread = (normal_quantile(1 - alpha) + normal_quantile(power)) ** 2 * (flips - difference**2)
    high = max(math.ceil(math.log(alpha) / math.log1p(-margin)), math.ceil(spread / (margin + difference) ** 2))
    low = 0
    while high <= MOST and not reached(high):
        low, high = high, math.ceil(1.15 * high) + 1
    if high > MOST:
        return None
    low = low or high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    n = high
    while (dip := next((k for k in range(n + TEETH - 1, n - 1, -1) if not reached(k)), None)) is not None:
        n = dip + 1
    return n


def power_table(
    margin: float, alpha: float, sizes: Sequence[int] = SIZES, flips: Sequence[float] = FLIPS
) -> tuple[PowerRow, ...]:
    """Power for each number of tasks and share of flips."""
    return tuple(PowerRow(n, share, pass_power(n, margin, alpha, share)) for n in sorted(set(sizes)) for share in flips)


def tasks_needed(
    limits: Limits, discordance: float, repeats: int = 1, power: float | None = None, *, systematic: float = SYSTEMATIC
) -> Plan:
    """The plan for a trial.

    Arguments:
        discordance: share of pairs that flip between two runs of the baseline (the A/A pilot), 0 to 1.
        repeats: of every task, in each arm.
        power: of the pass-rate limit; by default ``limits.power``.
        systematic: share of tasks whose verdict the change itself flips, as often for better as for worse.
    """
    for name, share in (("discordance", discordance), ("systematic", systematic)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{name} is {share}", where=name, expected="a share from 0 to 1")
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}", where="repeats", expected="at least 1")
    target = limits.power if power is None else power
    if not 0.5 <= target < 1:
        raise ConfigError(f"power is {target}", where="power", expected="at least .5 and below 1")
    flips = min(1.0, systematic + discordance / repeats)
    enough = tasks_for(limits.margin, limits.alpha, flips, target)
    needs = [
        Need(
            "pass_rate",
            enough,
            f"power {target:g} at a margin of {100 * limits.margin:g} points if {100 * flips:.3g}% of the tasks flip, alike "
            "both ways" + ("" if enough is not None else f": more than {MOST:,} tasks"),
        ),
        *_service_needs(limits, repeats),
    ]
    tasks = None if any(need.tasks is None for need in needs) else max(need.tasks or 0 for need in needs)
    at = enough if tasks is None else tasks
    sizes = SIZES if at is None else (*SIZES, at)
    return Plan(
        tasks=tasks,
        requests=None if tasks is None else tasks * repeats,
        power=None if at is None else pass_power(at, limits.margin, limits.alpha, flips),
        repeats=repeats,
        margin=limits.margin,
        alpha=limits.alpha,
        noise=discordance,
        systematic=systematic,
        flips=flips,
        needs=tuple(needs),
        table=power_table(limits.margin, limits.alpha, sizes, sorted({*FLIPS, flips})),
        notes=(
            "the candidate is as good as the baseline; one that is a little worse needs more tasks",
            f"{100 * systematic:g}% of the tasks flip for good (assumed); {100 * discordance:.3g}% of the pairs flip by "
            "sampling (the pilot's)",
            "tasks are a random sample of what the assistant is asked, independent of each other",
            "the other limits are taken to hold with certainty once they can be judged",
        ),
    )


def _service_needs(limits: Limits, repeats: int) -> list[Need]:
    """What the limits on failures, percentiles and tool calls need, where they are set."""
    found = []
    if limits.failure_rate == 0:
        found.append(Need("failure_rate", None, "no number of requests shows a rate of 0"))
    elif limits.failure_rate < 1:
        n = proportions.requests_for_rate(limits.failure_rate, limits.alpha)
        why = f"{n} requests without a failure for an upper limit of {100 * limits.failure_rate:g}%"
        found.append(Need("failure_rate", math.ceil(n / repeats), why))
    asked = {"latency_p50": (limits.latency_p50_ratio, 0.5), "latency_p95": (limits.latency_p95_ratio, 0.95)}
    for name, (limit, q) in (asked | {"latency_limit": (limits.latency_limit, 0.95)}).items():
        if limit is not None:
            carried = percentiles.requests_needed(q)
            found.append(Need(name, math.ceil(carried / repeats), f"{carried} requests an arm carry p{100 * q:g}"))
    if limits.length_ratio is not None:
        few = resample.least_clusters(limits.alpha)
        found.append(Need("length_ratio", few, f"{few} tasks for a bootstrap"))
    if limits.tool_parse_drop is not None:
        drop = min(limits.tool_parse_drop, 0.99)
        tools = None if drop == 0 else tasks_for(drop, limits.alpha, 0.0, limits.power)
        found.append(Need("tool_parse", tools, f"tasks with tools, if no call is lost ({100 * drop:g} points)"))
    return found
