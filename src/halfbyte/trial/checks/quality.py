"""Quality: the pass rate against the margin, critical tasks, and tool calls that parse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from halfbyte.statistics.special import Reals
from halfbyte.trial.checks.verdicts import unknown
from halfbyte.trial.outcome import Check, Detail
from halfbyte.trial.pairs import Pair
from halfbyte.trial.records import TaskInfo
from halfbyte.trial.statistics import mcnemar, repeats, tango, unconditional

__all__ = ["critical_tasks", "non_inferiority", "pass_rate", "tool_parse"]

Outcomes = list[tuple[bool, bool]]  # (baseline, candidate) of the repeats of a task


def pass_rate(paired: Mapping[str, Sequence[Pair]], margin: float, alpha: float) -> Check:
    """The candidate's pass rate may be lower by less than ``margin``."""
    outcomes = [[(p.baseline_passed, p.candidate_passed) for p in of_task] for of_task in paired.values()]
    check = non_inferiority("pass_rate", outcomes, margin, alpha)
    lost = sum(p.baseline.passed is None for of_task in paired.values() for p in of_task)
    if lost:
        note = f"{check.note}; {lost} baseline requests without a verdict count as passed"
        return Check(**{**check.to_json(), "note": note, "details": {**check.details, "baseline_missing": lost}})
    return check


def non_inferiority(name: str, outcomes: Sequence[Outcomes], margin: float | None, alpha: float) -> Check:
    """Is the share of successes lower by less than ``margin``? None asks for the interval alone.

    Tasks that all repeats agree on are single pairs: Tango's interval, and the exact unconditional test. Otherwise the score
    interval for repeats, the cluster bootstrap over tasks, and the score's null distribution. Of the limits the more
    cautious one counts.
    """
    differences = np.array([sum(int(c) - int(b) for b, c in task) / len(task) for task in outcomes])
    gains = sum(c and not b for task in outcomes for b, c in task)
    losses = sum(b and not c for task in outcomes for b, c in task)
    total = sum(map(len, outcomes))
    evidence = (_single if np.all(np.isin(differences, (-1.0, 0.0, 1.0))) else _repeated)(differences, margin, alpha)
    low, high = evidence.interval
    ok: bool | None = True
    if margin is not None and margin < 1:
        ok = True if evidence.passes else False if evidence.fails else None
        # The exact p-value is not quite monotone: where the test and the interval's end differ, the test decides.
        low = max(low, math.nextafter(-margin, 1)) if ok is True else min(low, -margin)
        high = min(high, math.nextafter(-margin, -1)) if ok is False else max(high, -margin)
    details: dict[str, Detail] = {
        "tasks": len(outcomes),
        "repeats": max(map(len, outcomes)),
        "pairs": total,
        "gains": gains,
        "losses": losses,
        "baseline_rate": sum(b for task in outcomes for b, _ in task) / total,
        "candidate_rate": sum(c for task in outcomes for _, c in task) / total,
        # Repeats of a task are not independent: the first of each.
        "mcnemar_p": mcnemar.mcnemar(
            sum(c and not b for (b, c), *_ in outcomes), sum(b and not c for (b, c), *_ in outcomes)
        ),
    }
    return Check(
        name=name,
        unit="points",
        sense="more than",
        estimate=float(differences.mean()),
        low=low,
        high=high,
        limit=None if margin is None else -margin,
        ok=ok,
        note=f"{gains} pairs gained, {losses} lost of {total}; {evidence.note}",
        details=details | evidence.details,
    )


@dataclass(frozen=True)
class _Evidence:
    """An interval, and whether the tests at the margin reject "at least so much worse" (passes) and "not so bad" (fails)."""

    interval: tuple[float, float]
    passes: bool
    fails: bool
    note: str
    details: dict[str, Detail]


def _single(differences: Reals, margin: float | None, alpha: float) -> _Evidence:
    up, down, n = int((differences > 0).sum()), int((differences < 0).sum()), len(differences)
    low, high = tango.interval(up, down, n, alpha)
    exact = unconditional.lower_bound(up, down, n, alpha), -unconditional.lower_bound(down, up, n, alpha)
    note = f"Tango's interval {_points(low, high)}, exact {_points(*exact)}"
    details: dict[str, Detail] = {"tango_low": low, "tango_high": high}
    if margin is None or margin >= 1:
        return _Evidence(exact, False, False, note, details)
    p, worse = unconditional.p_value(up, down, n, -margin), unconditional.p_value(down, up, n, margin)
    note += f"; exact unconditional p = {p:.3g} at the margin"
    return _Evidence(
        exact, low > -margin and p <= alpha, high < -margin and worse <= alpha, note, details | {"exact_p": p}
    )


def _repeated(differences: Reals, margin: float | None, alpha: float) -> _Evidence:
    low, high = repeats.interval(differences, alpha)
    note = f"score interval over tasks {_points(low, high)}"
    details: dict[str, Detail] = {"score_low": low, "score_high": high}
    if (drawn := repeats.bootstrap_interval(differences, alpha)) is not None:
        note += f", cluster bootstrap {_points(*drawn)}"
        details |= {"bootstrap_low": drawn[0], "bootstrap_high": drawn[1]}
        low, high = min(low, drawn[0]), max(high, drawn[1])
    passes = fails = False
    if margin is not None and low > -margin:
        details["null_p"] = p = repeats.bootstrap_p_value(differences, -margin)
        note, passes = f"{note}; p = {p:.3g} at the margin", p <= alpha
    elif margin is not None and high < -margin:
        fails = repeats.bootstrap_p_value(-differences, margin) <= alpha
    return _Evidence((low, high), passes, fails, note, details)


def critical_tasks(paired: Mapping[str, Sequence[Pair]], tasks: Sequence[TaskInfo], limit: int) -> Check:
    """Critical tasks that the baseline passes and the candidate fails, by the majority of repeats. A count, not a sample."""
    critical = [task.id for task in tasks if task.critical]
    broken = [
        name
        for name in critical
        if 2 * sum(p.baseline_passed for p in paired[name]) > len(paired[name])
        and 2 * sum(p.candidate_passed for p in paired[name]) <= len(paired[name])
    ]
    note = f"{len(broken)} of {len(critical)} critical tasks newly fail" + (f": {', '.join(broken)}" if broken else "")
    count = float(len(broken))
    return Check(
        "critical_tasks",
        "count",
        "at most",
        count,
        count,
        count,
        float(limit),
        len(broken) <= limit,
        note,
        {"critical": len(critical)},
    )


def tool_parse(
    paired: Mapping[str, Sequence[Pair]], tasks: Sequence[TaskInfo], drop: float | None, alpha: float
) -> Check:
    """Share of tool tasks' responses in which a tool call parses; may be lower by less than ``drop``.

    A model that lost its tool calls answers in text with finish_reason stop, and looks healthy otherwise.
    """
    limit = None if drop is None else -drop
    asked = {task.id for task in tasks if task.tools}
    outcomes = [
        [(p.baseline.error is not None or bool(p.baseline.tool_calls), bool(p.candidate.tool_calls)) for p in of_task]
        for name, of_task in paired.items()
        if name in asked
    ]
    if not outcomes:
        return unknown("tool_parse", "points", limit, "no task offers tools")
    return non_inferiority("tool_parse", outcomes, drop, alpha)


def _points(low: float, high: float) -> str:
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]"
