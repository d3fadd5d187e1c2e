"""Axes: from numbers to pixels, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Axis", "linear_axis", "logarithmic_axis", "number"]


@dataclass(frozen=True)
class Axis:
    """A range of values laid over a range of pixels.

    Arguments:
        low, high: the ends in values (their logarithms when ``logarithmic``).
        start, end: the ends in pixels; ``start`` may be the larger one.
        ticks: values to label.
        logarithmic: base 10.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def labels(self) -> list[str]:
        """The ticks as text, with as many decimals as tell neighbours apart."""
        largest = max(map(abs, self.ticks))
        if self.logarithmic or len(self.ticks) < 2 or not 1e-3 <= largest < 1e4:
            return [number(tick) for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [f"{tick:.{decimals}f}" for tick in self.ticks]

    def pixel(self, value: float) -> float:
        """Where a value lies; values outside are moved to the nearer end."""
        position = math.log10(max(value, 1e-300)) if self.logarithmic else value
        share = (position - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))


def linear_axis(low: float, high: float, start: float, end: float, *, ticks: int = 5, whole: bool = False) -> Axis:
    """An axis whose ends are round numbers around ``low`` and ``high``.

    Arguments:
        ticks: about how many.
        whole: ticks at integers only.
    """
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        pad = abs(high) * 0.1
        low, high = (low - pad, high + pad) if pad else (0.0, 1.0)
    step = _round_step((high - low) / ticks)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, start, end, tuple(i * step for i in range(first, last + 1)))


def logarithmic_axis(values: Sequence[float], start: float, end: float) -> Axis | None:
    """An axis over whole decades, or None where a logarithmic one shows nothing more than a linear one.

    Values that are not positive cannot be shown and are ignored; a range of less than a factor 20 is left linear. At most
    eight decades are shown: smaller values (a gap of a few rounding errors) lie on the lower edge.
    """
    positive = [v for v in values if v > 0]
    if not positive or max(positive) < 20 * min(positive):
        return None
    last = math.ceil(math.log10(max(positive)))
    first = max(math.floor(math.log10(min(positive))), last - 8)
    every = max(1, math.ceil((last - first) / 6))
    return Axis(first, last, start, end, tuple(10.0**e for e in range(first, last + 1, every)), logarithmic=True)


def number(value: float, digits: int = 3) -> str:
    """A short decimal: 0.0125, 12.5, 1.2M, 3e-05."""
    magnitude = abs(value)
    if magnitude and (magnitude < 1e-3 or magnitude >= 1e9):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if magnitude >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.{digits}g}{unit}"
    return f"{value:.0f}" if magnitude >= 1000 else f"{value:.{digits}g}"


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return float(next(m for m in (1.0, 2.0, 5.0, 10.0) if step <= m * power * (1 + 1e-9)) * power)
