"""One comparison: our calls, a baseline's calls, an error; and the row it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.bench.timing import Arm, interleave

__all__ = ["Case", "KernelRow", "measure"]


@dataclass(frozen=True)
class Case:
    """What is compared with what.

    Arguments:
        kernel: our operation and its precision, such as ``linear-w4a4``.
        n, k, m: outputs, inputs and tokens; what they are for other kernels than products is in docs/benchmarks.md.
        ours, theirs: calls of either side, rotated.
        baseline: what the other side is.
        error: computes the relative error of our result against float64 on the same operands.
        facts: further entries of the row, known before it runs.
        elements: values that a call converts (quantise, dequantise); 0 for other kernels.
        threads: what ``elements`` per second are divided by.
    """

    kernel: str
    n: int
    k: int
    m: int
    ours: Sequence[Callable[[], object]]
    baseline: str
    theirs: Sequence[Callable[[], object]]
    error: Callable[[], float]
    facts: Mapping[str, Any] = field(default_factory=dict)
    elements: int = 0
    threads: int = 1


@dataclass(frozen=True)
class KernelRow:
    """One line of the table."""

    kernel: str
    n: int
    k: int
    m: int
    milliseconds: float
    baseline: str
    baseline_milliseconds: float
    relative_error: float
    facts: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """How many times faster than the baseline, from the two medians."""
        return self.baseline_milliseconds / self.milliseconds

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return {
            "kernel": self.kernel,
            "n": self.n,
            "k": self.k,
            "m": self.m,
            "milliseconds": self.milliseconds,
            "baseline": self.baseline,
            "baseline_milliseconds": self.baseline_milliseconds,
            "ratio": self.ratio,
            "relative_error": self.relative_error,
            **self.facts,
        }


def measure(case: Case, *, repeats: int, minimum: float = 0.004, limit: float = 4.0) -> KernelRow:
    """Check, then time; see :func:`halfbyte.bench.timing.interleave`."""
    error = case.error()
    ours, theirs = interleave(
        [Arm("ours", case.ours), Arm(case.baseline, case.theirs)], repeats=repeats, minimum=minimum, limit=limit
    )
    facts: dict[str, Any] = {
        "milliseconds_quartiles": [1e3 * q for q in ours.quartiles],
        "baseline_milliseconds_quartiles": [1e3 * q for q in theirs.quartiles],
        "rounds": len(ours.seconds),
        **case.facts,
    }
    if case.elements:
        facts["gelem_per_second_per_thread"] = case.elements / ours.median / case.threads / 1e9
    return KernelRow(
        case.kernel,
        case.n,
        case.k,
        case.m,
        1e3 * ours.median,
        case.baseline,
        1e3 * theirs.median,
        error,
        facts,
    )
