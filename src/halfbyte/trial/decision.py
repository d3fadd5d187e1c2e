"""The verdict: every limit must hold (keep), one is broken with confidence (retain), or the records do not tell.

All limits must hold at one-sided alpha each, so a candidate that truly breaks one is kept at most a share alpha of the time
(an intersection-union test; Berger, Technometrics 24, 1982): no correction for their number is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from halfbyte.trial.checks import benefit, quality, service
from halfbyte.trial.more_tasks import more_tasks
from halfbyte.trial.outcome import EXIT_CODES, Check, Decision, Verdict
from halfbyte.trial.pairs import blocks, integrity, pairs
from halfbyte.trial.records import Arm, ArmUsage, Record, TaskInfo

if TYPE_CHECKING:
    from halfbyte.trial.settings import Cost, Limits

__all__ = ["Check", "Decision", "decide"]


def decide(
    records: Sequence[Record],
    tasks: Sequence[TaskInfo],
    limits: Limits,
    usage: Mapping[Arm, ArmUsage],
    cost: Cost,
    *,
    invalid: Sequence[str] = (),
    peaks: Mapping[Arm, Sequence[int]] | None = None,
) -> Decision:
    """The decision on the records of a run. The same records give the same decision, whatever their order.

    Arguments:
        usage: by arm; a missing arm is a remote server.
        invalid: what others found wrong (a broken chain, another template, cache hits): the trial is invalid.
        peaks: peak bytes of each block by arm, where they were measured more than once.
    """
    wrong = [*invalid, *integrity(records, tasks)]
    if wrong:
        return Decision("invalid", EXIT_CODES["invalid"], (), None, tuple(wrong))
    records = sorted(records, key=lambda r: (r.block, r.position))
    paired, served = pairs(records), blocks(records)
    alpha = limits.alpha
    checks = [
        quality.pass_rate(paired, limits.margin, alpha),
        quality.critical_tasks(paired, tasks, limits.critical),
        service.failure_rate(records, limits.failure_rate, alpha),
        service.latency_ratio("latency_p50", served, 0.5, limits.latency_p50_ratio, alpha),
        service.latency_ratio("latency_p95", served, 0.95, limits.latency_p95_ratio, alpha),
        service.length_ratio(paired, limits.length_ratio, alpha),
    ]
    if limits.tool_parse_drop is not None or any(task.tools for task in tasks):
        checks.append(quality.tool_parse(paired, tasks, limits.tool_parse_drop, alpha))
    if limits.benefit == "throughput" and limits.latency_limit is not None:
        checks.append(service.latency_limit(served, limits.latency_limit, alpha))
    checks.append(benefit.benefit(served, limits, usage, cost, peaks or {}))
    verdict: Verdict = (
        "retain"
        if any(check.ok is False for check in checks)
        else "inconclusive"
        if any(check.ok is None for check in checks)
        else "keep"
    )
    reasons = [_reason(check) for check in checks if check.ok is not True]
    more = more_tasks(checks, paired, limits) if verdict == "inconclusive" else None
    if more is not None:
        reasons.append(
            f"a new trial with about {more:,} tasks more ({len(paired) + more:,}) could conclude; adding tasks to this one after "
            "seeing its result would raise the error"
        )
    return Decision(verdict, EXIT_CODES[verdict], tuple(checks), more, tuple(reasons))


def _reason(check: Check) -> str:
    """Why a check does not hold, in a sentence."""
    if check.estimate is None:
        return f"{check.name}: {check.note}"
    state = "broken" if check.ok is False else "not shown"
    ends = f"{_number(check.low)} to {_number(check.high)}"
    return (
        f"{check.name} {check.sense} {_number(check.limit)}: {state}, {_number(check.estimate)} ({ends}); {check.note}"
    )


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
