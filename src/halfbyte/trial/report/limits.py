"""The checks of a verdict as rows: what was asked, what was found, whether it holds, and the strip that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from halfbyte.html.scale import number
from halfbyte.html.table import Table
from halfbyte.trial.outcome import Check, Decision, Unit
from halfbyte.trial.report.charts import limit_strip
from halfbyte.trial.report.words import per_cent, points, ratio, seconds

__all__ = ["LimitRow", "limit_rows", "limit_table"]

_NAMES = {
    "pass_rate": "pass rate, candidate less baseline",
    "critical_tasks": "critical tasks newly failed",
    "failure_rate": "failed requests of the candidate",
    "latency_p50": "median latency, candidate / baseline",
    "latency_p95": "p95 latency, candidate / baseline",
    "latency_limit": "p95 latency of the candidate",
    "length_ratio": "response length, candidate / baseline",
    "tool_parse": "tool calls that parse, candidate less baseline",
    "peak_memory": "benefit: less peak memory",
    "cost_per_passed": "benefit: less cost per passed task",
    "throughput": "benefit: more throughput",
}
_UNITS: Mapping[Unit, Callable[[float], str]] = {
    "points": points,
    "share": per_cent,
    "ratio": ratio,
    "count": number,
    "seconds": seconds,
    "improvement": lambda value: f"{100 * value:+.1f}%",
}
_NEUTRAL: Mapping[Unit, float] = {"points": 0.0, "ratio": 1.0, "improvement": 0.0}


@dataclass(frozen=True)
class LimitRow:
    """A check in words.

    Arguments:
        state: ``holds``, ``broken``, ``open`` (the interval reaches across the limit, or there is none), ``not asked``.
        colour: class of the state.
        svg: empty where nothing can be drawn.
    """

    name: str
    state: str
    colour: str
    estimate: str
    interval: str
    limit: str
    note: str
    svg: str

    @property
    def words(self) -> str:
        """Estimate, interval and limit as a sentence's parts."""
        return "; ".join(part for part in (self.estimate, self.interval, self.limit) if part)


def limit_rows(decision: Decision) -> list[LimitRow]:
    """Rows in the order of the decision, those that were only shown last."""
    return [_row(check) for check in sorted(decision.checks, key=lambda check: check.limit is None)]


def limit_table(decision: Decision) -> Table:
    """The same as text."""
    rows = [[r.name, r.state, r.estimate, r.interval, r.limit, r.note] for r in limit_rows(decision)]
    return Table("Limits", [["limit on", "", "estimate", "interval", "limit", "note"], *rows])


def _row(check: Check) -> LimitRow:
    say = _UNITS[check.unit]
    name = _NAMES.get(check.name, check.name)
    if check.limit is None:
        state, colour = "not asked", "soft"
    elif check.ok is None:
        state, colour = "open", "open"
    else:
        state, colour = ("holds", "right") if check.ok else ("broken", "wrong")
    svg = ""
    if check.limit is not None and check.estimate is not None:
        svg = limit_strip(
            f"{name}: {say(check.estimate)}, limit {check.sense} {say(check.limit)}",
            estimate=check.estimate,
            low=check.low,
            high=check.high,
            limit=check.limit,
            allowed="below" if check.sense == "at most" else "above",
            neutral=_NEUTRAL.get(check.unit),
        )
    return LimitRow(
        name=name,
        state=state,
        colour=colour,
        estimate="not measured" if check.estimate is None else say(check.estimate),
        interval=_interval(check, say),
        limit="no limit" if check.limit is None else f"limit: {check.sense} {say(check.limit)}",
        note=check.note,
        svg=svg,
    )


def _interval(check: Check, say: Callable[[float], str]) -> str:
    low, high = check.low, check.high
    if low is None or high is None:
        return "" if low is high else f"up to {say(high)}" if high is not None else f"from {say(low or 0.0)}"
    if low == check.estimate == high:
        return ""
    first, unit, last = say(low), say(high).partition(" ")[2], say(high)
    return f"{first.removesuffix(f' {unit}') if unit else first} to {last}"
