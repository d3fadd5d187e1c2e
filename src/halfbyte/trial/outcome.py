"""What a trial decides: one verdict, and the checks it follows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from halfbyte.trial.records import Strict

__all__ = ["EXIT_CODES", "Check", "Decision", "Detail", "Sense", "Unit", "Verdict"]

Verdict: TypeAlias = Literal["keep", "retain", "inconclusive", "invalid"]
Sense: TypeAlias = Literal["at least", "at most", "more than"]
Unit: TypeAlias = Literal["points", "share", "ratio", "count", "seconds", "improvement"]
Detail: TypeAlias = float | int | str | None

EXIT_CODES: dict[Verdict, int] = {"keep": 0, "retain": 1, "inconclusive": 2, "invalid": 3}


@dataclass(frozen=True)
class Check(Strict):
    """One limit and whether it holds.

    Arguments:
        name: ``pass_rate``, ``critical_tasks``, ``failure_rate``, ``latency_p50``, ``latency_p95``, ``latency_limit``,
            ``length_ratio``, ``tool_parse``, or the benefit: ``peak_memory``, ``cost_per_passed``, ``throughput``.
        unit: of the four numbers. points: difference of shares (.05 is 5 points); improvement: fraction gained.
        sense: how the number must lie to the limit ("at least": its low end, "at most": its high end).
        estimate: None where the records do not carry one.
        low, high: one-sided limits at alpha each; None where there is none (or it is infinite).
        limit: None where the settings ask for none: shown only, and ok.
        ok: True, False, or None: the interval reaches across the limit, or there is none.
        note: how it was computed, or why not, in a sentence.
        details: further numbers by name.
    """

    name: str
    unit: Unit
    sense: Sense
    estimate: float | None
    low: float | None
    high: float | None
    limit: float | None
    ok: bool | None
    note: str
    details: dict[str, Detail]


@dataclass(frozen=True)
class Decision(Strict):
    """The verdict.

    Arguments:
        verdict: keep the candidate; retain the baseline; inconclusive (retain for now); invalid records.
        exit_code: 0, 1, 2, 3.
        checks: empty for invalid records.
        more_tasks: for inconclusive: tasks beyond these with which a new trial could conclude; None where tasks do not help,
            or the verdict needs none.
        reasons: in sentences; why not keep, and what would settle it.
    """

    verdict: Verdict
    exit_code: int
    checks: tuple[Check, ...]
    more_tasks: int | None
    reasons: tuple[str, ...]

    def check(self, name: str) -> Check | None:
        """The check of that name."""
        return next((check for check in self.checks if check.name == name), None)
