"""Metrics that add up over micro-batches: totals and counts, never means of means.

A loss or correction returns ``Statistics``; the trainer merges those of all micro-batches of a step and reads the
numbers once. Every statistic counts the tokens (or samples) it saw, so padding and batch shapes cannot dilute it (verl
#7771).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Statistic", "Statistics", "extreme_of", "mean_of", "merge", "read", "total_of"]

Kind = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, eq=False)
class Statistic:
    """One mergeable metric.

    Arguments:
        kind: how two of them merge and what the value is (mean = total / count).
        total: [] float64: the sum, or the extreme, of the values seen.
        count: [] float64: how many values were seen.
    """

    kind: Kind
    total: Tensor
    count: Tensor

    def __add__(self, other: Statistic) -> Statistic:
        """The statistic of both sets of values together."""
        assert self.kind == other.kind, "one name, two kinds of statistic"
        if self.kind == "max":
            total = torch.maximum(self.total, other.total)
        elif self.kind == "min":
            total = torch.minimum(self.total, other.total)
        else:
            total = self.total + other.total
        return Statistic(self.kind, total, self.count + other.count)

    def value(self) -> float | None:
        """The number to report, or None if nothing was counted (a mean of nothing is not 0)."""
        if float(self.count) == 0:
            return None
        return float(self.total / self.count) if self.kind == "mean" else float(self.total)


Statistics: TypeAlias = dict[str, Statistic]


def mean_of(values: Tensor) -> Statistic:
    """Mean over the values (bool counts as 0/1: a share). ``values`` holds real tokens only, any shape."""
    return Statistic("mean", values.detach().double().sum(), _count(values))


def total_of(values: Tensor) -> Statistic:
    """Sum over the values; use it for quantities that are already divided by the step's denominators."""
    return Statistic("sum", values.detach().double().sum(), _count(values))


def extreme_of(values: Tensor, kind: Literal["max", "min"]) -> Statistic:
    """Largest or smallest of the values; of no values it is the neutral element with count 0."""
    detached = values.detach().double().reshape(-1)
    neutral = detached.new_full((1,), -torch.inf if kind == "max" else torch.inf)
    both = torch.cat([detached, neutral])
    return Statistic(kind, both.max() if kind == "max" else both.min(), _count(values))


def merge(parts: Iterable[Mapping[str, Statistic]]) -> Statistics:
    """Merge the statistics of micro-batches (or ranks); a name missing from one part simply saw nothing there."""
    merged: Statistics = {}
    for part in parts:
        for name, statistic in part.items():
            merged[name] = merged[name] + statistic if name in merged else statistic
    return merged


def read(statistics: Mapping[str, Statistic]) -> dict[str, float]:
    """The numbers, as Python floats; metrics that saw nothing are left out (JSON has no NaN)."""
    values = {name: statistic.value() for name, statistic in statistics.items()}
    return {name: value for name, value in values.items() if value is not None}


def _count(values: Tensor) -> Tensor:
    return torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
