"""The one metric the change is for, with a lower bound: peak memory, cost per passed task, or throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.statistics.special import Reals
from halfbyte.trial.checks.verdicts import finite
from halfbyte.trial.cost import extra_per_request, price_per_second
from halfbyte.trial.outcome import Check, Detail
from halfbyte.trial.pairs import Block
from halfbyte.trial.records import ARMS, Arm, ArmUsage, Record
from halfbyte.trial.statistics import resample

if TYPE_CHECKING:
    from halfbyte.trial.settings import Cost, Limits

__all__ = ["benefit"]

#: Pools of KV pages that differ by more than this are not the same set-up.
POOL_TOLERANCE = 0.01


def benefit(
    served: Sequence[Block],
    limits: Limits,
    usage: Mapping[Arm, ArmUsage],
    cost: Cost,
    peaks: Mapping[Arm, Sequence[int]],
) -> Check:
    """The check of ``limits.benefit``: the lower bound of the improvement must exceed ``limits.benefit_min``."""
    if limits.benefit == "peak_memory":
        return _peak_memory(usage, peaks, limits.benefit_min)
    if limits.benefit == "throughput":
        return _throughput(served, limits.benefit_min, limits.alpha)
    return _cost_per_passed(served, usage, cost, limits.benefit_min, limits.alpha)


def _peak_memory(usage: Mapping[Arm, ArmUsage], peaks: Mapping[Arm, Sequence[int]], least: float) -> Check:
    """1 - candidate / baseline. A measurement, not a sample; its ends are the worst and best pairing of the blocks' peaks."""
    name = "peak_memory"
    seen: dict[Arm, list[int]] = {}
    for arm in ARMS:
        used = usage.get(arm)
        if used is None or used.peak_bytes is None:
            why = "is remote" if used is None or used.source == "remote" else "reports no peak"
            return _unknown(name, least, f"cannot claim memory: the {arm}'s server {why}")
        seen[arm] = [*peaks.get(arm, ()), used.peak_bytes]
    before, after = usage["baseline"], usage["candidate"]
    assert before.peak_bytes is not None
    assert after.peak_bytes is not None
    pools = before.kv_capacity_tokens, after.kv_capacity_tokens
    details: dict[str, Detail] = {
        "baseline_bytes": before.peak_bytes,
        "candidate_bytes": after.peak_bytes,
        "baseline_kv_tokens": pools[0],
        "candidate_kv_tokens": pools[1],
        "blocks": max(len(peaks.get(arm, ())) for arm in ARMS),
    }
    means = [used.source.split(" + ")[-1] for used in (before, after)]
    if means[0] != means[1]:  # such as a candidate that fell back to the CPU: its memory there is another thing
        note = f"peaks by {means[0]} in the baseline and by {means[1]} in the candidate do not compare"
        return _unknown(name, least, note, details)
    known = [size for size in pools if size is not None]
    if len(known) == len(pools) and max(known) - min(known) > POOL_TOLERANCE * max(known):
        note = f"KV pools of {known[0]:,} and {known[1]:,} tokens: pin them equal, or memory compares pools, not models"
        return _unknown(name, least, note, details)
    note = f"{_gib(after.peak_bytes)} against {_gib(before.peak_bytes)} ({before.source})"
    if len(known) < len(pools):
        note += "; a server does not report its KV pool, so equal pools are not shown"
    return _improvement(
        name,
        1 - after.peak_bytes / before.peak_bytes,
        (1 - max(seen["candidate"]) / min(seen["baseline"]), 1 - min(seen["candidate"]) / max(seen["baseline"])),
        least,
        note,
        details,
    )


def _throughput(served: Sequence[Block], least: float, alpha: float) -> Check:
    """Answered requests a second, candidate over baseline, less 1; bootstrap of blocks."""
    answered, seconds = _per_block(served, lambda record: record.error is None)

    def rates(drawn: Reals) -> Reals:
        done, took = drawn @ answered, drawn @ seconds
        before, after = done[:, 0] / took[:, 0], done[:, 1] / took[:, 1]
        return np.where(before > 0, after / np.where(before > 0, before, 1.0) - 1, np.inf)

    before, after = answered.sum(axis=0) / seconds.sum(axis=0)
    details: dict[str, Detail] = {"baseline_per_second": float(before), "candidate_per_second": float(after)}
    return _bootstrapped(
        "throughput", rates, len(served), least, alpha, f"{after:.3g} against {before:.3g} requests a second", details
    )


def _cost_per_passed(
    served: Sequence[Block], usage: Mapping[Arm, ArmUsage], cost: Cost, least: float, alpha: float
) -> Check:
    """1 - candidate / baseline of the cost per passed task, set-up and upkeep spread over requests; bootstrap of blocks."""
    name = "cost_per_passed"
    prices = [price_per_second(cost, usage.get(arm)) for arm in ARMS]
    setup, operating = extra_per_request(cost)
    if setup is None or operating is None:
        return _unknown(name, least, "set-up and upkeep cannot be spread: cost.requests_per_month is 0")
    if prices[0] is None or prices[1] is None:
        return _unknown(name, least, "the price goes by memory, and a server's peak is not known")
    price = np.array(prices, float)
    extra = np.array([0.0, setup + operating])
    passed, seconds = _per_block(served, lambda record: record.passed is True)
    requests, _ = _per_block(served, lambda record: True)

    def each(drawn: Reals) -> Reals:
        total, good = (drawn @ seconds) * price + (drawn @ requests) * extra, drawn @ passed
        return np.where(good > 0, total / np.where(good > 0, good, 1.0), np.inf)

    def saved(drawn: Reals) -> Reals:
        before, after = each(drawn).T
        share = np.where(np.isfinite(after), after, 0.0) / np.where(np.isfinite(before), before, 1.0)
        # No pass in the candidate: nothing is saved. None in the baseline: any pass is worth more.
        return np.where(np.isinf(after), -np.inf, np.where(np.isinf(before), 1.0, 1 - share))

    before, after = each(np.ones((1, len(served))))[0]
    details: dict[str, Detail] = {"baseline_cost": finite(float(before)), "candidate_cost": finite(float(after))}
    note = f"{after:.4g} against {before:.4g} {cost.currency} a passed task"
    return _bootstrapped(name, saved, len(served), least, alpha, note, details)


def _per_block(served: Sequence[Block], counts: Callable[[Record], bool]) -> tuple[Reals, Reals]:
    """Records that count, and seconds: [blocks, arms]."""
    kept = [[sum(map(counts, block.records[arm])) for arm in ARMS] for block in served]
    return np.array(kept, float), np.array([[block.seconds[arm] for arm in ARMS] for block in served], float)


def _bootstrapped(
    name: str,
    statistic: Callable[[Reals], Reals],
    blocks: int,
    least: float,
    alpha: float,
    note: str,
    details: dict[str, Detail],
) -> Check:
    interval = resample.limits(statistic, blocks, alpha)
    estimate = float(statistic(np.ones((1, blocks)))[0])
    if interval is None:
        note = f"{note}; {blocks} blocks: no limit at alpha {alpha:g} from fewer than {resample.least_clusters(alpha)}"
        return Check(name, "improvement", "more than", finite(estimate), None, None, least, None, note, details)
    note = f"{note}; bootstrap of {blocks} blocks"
    return _improvement(name, estimate, interval, least, note, details | {"blocks": blocks})


def _improvement(
    name: str, estimate: float, interval: tuple[float, float], least: float, note: str, details: dict[str, Detail]
) -> Check:
    low, high = interval
    ok = True if low > least else False if high <= least else None
    return Check(
        name, "improvement", "more than", finite(estimate), finite(low), finite(high), least, ok, note, details
    )


def _unknown(name: str, least: float, note: str, details: dict[str, Detail] | None = None) -> Check:
    return Check(name, "improvement", "more than", None, None, None, least, None, note, details or {})


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"
