"""Charts of a trial as inline SVG: one limit beside its estimate, bars of both arms, distributions of latency.

Colours are classes of the page's style: 0 the baseline, 1 the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from halfbyte.html.scale import Axis, linear_axis, logarithmic_axis
from halfbyte.html.text import visible
from halfbyte.trial.records import ARMS

__all__ = ["Bar", "bars_chart", "distribution_chart", "limit_strip"]

WIDTH = 440
#: of a strip
STRIP_WIDTH, STRIP_HEIGHT, MARGIN = 320, 30, 8
#: of bars: names to the left, values to the right
NAMES, VALUES, ROW = 92, 96, 22
#: of a distribution
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 46, 14, 12, 34, 230


@dataclass(frozen=True)
class Bar:
    """A pair of bars, by default of the baseline and the candidate. ``words`` stand behind them.

    Arguments:
        values: not negative; None draws no bar.
    """

    name: str
    values: tuple[float | None, float | None]
    words: tuple[str, str]


def limit_strip(
    label: str,
    *,
    estimate: float | None,
    low: float | None,
    high: float | None,
    limit: float,
    allowed: Literal["above", "below"],
    neutral: float | None = None,
) -> str:
    """An estimate with its interval on an axis of its own, the side that the limit forbids shaded.

    Arguments:
        low, high: ends of the interval; None or infinite where it has none on that side (it then runs to the edge).
        allowed: the side of ``limit`` that holds.
        neutral: where nothing changed (0 of a difference, 1 of a ratio): a thin line.
    """
    ends = [v for v in (estimate, low, high) if v is not None and math.isfinite(v)]
    known = [*ends, limit, *([] if neutral is None else [neutral])]
    least, most = min(known), max(known)
    pad = 0.12 * (most - least) or 0.1 * abs(most) or 0.1
    x = Axis(least - pad, most + pad, MARGIN, STRIP_WIDTH - MARGIN, ())
    top, bottom, middle = 4, STRIP_HEIGHT - 4, STRIP_HEIGHT / 2
    at = x.pixel(limit)
    left, right = (MARGIN, at) if allowed == "above" else (at, STRIP_WIDTH - MARGIN)
    parts = [
        f'<rect class="forbidden" x="{left:.1f}" y="{top}" width="{max(0.0, right - left):.1f}" height="{bottom - top}"/>',
        f'<path class="axis" d="M{MARGIN},{bottom}H{STRIP_WIDTH - MARGIN}"/>',
    ]
    if neutral is not None:
        parts.append(f'<path class="neutral" d="M{x.pixel(neutral):.1f},{top}V{bottom}"/>')
    parts.append(f'<path class="limit" d="M{at:.1f},{top - 2}V{bottom + 2}"/>')
    if estimate is not None and math.isfinite(estimate):
        a = MARGIN if low is None or math.isinf(low) else x.pixel(low)
        b = STRIP_WIDTH - MARGIN if high is None or math.isinf(high) else x.pixel(high)
        if low is not None or high is not None:
            parts.append(f'<path class="line c0" d="M{a:.1f},{middle}H{b:.1f}"/>')
        parts.append(f'<circle class="dot c0" cx="{x.pixel(estimate):.1f}" cy="{middle}" r="4.5"/>')
    return _svg(label, parts, STRIP_WIDTH, STRIP_HEIGHT)


def bars_chart(
    label: str, groups: Sequence[Bar], kinds: tuple[str, str] = ARMS, colours: tuple[int, int] = (0, 1)
) -> str:
    """Horizontal bars in pairs, all on one axis from 0. Empty without a value.

    Arguments:
        kinds: what the first and the second bar of a pair are.
    """
    values = [v for bar in groups for v in bar.values if v is not None]
    if not values:
        return ""
    x = Axis(0.0, max(values) or 1.0, NAMES, WIDTH - VALUES, ())
    parts, y = [], 4.0
    for bar in groups:
        parts.append(
            f'<text class="tick" x="{NAMES - 8}" y="{y + ROW + 4:.1f}" text-anchor="end">{_text(bar.name)}</text>'
        )
        for kind, colour, value, words in zip(kinds, colours, bar.values, bar.words):
            end = NAMES if value is None else x.pixel(value)
            if value is not None:
                width = max(1.0, end - NAMES)
                parts.append(
                    f'<g><title>{_text(f"{bar.name}, {kind}: {words}")}</title><rect class="area c{colour}" '
                    f'x="{NAMES}" y="{y + 2:.1f}" width="{width:.1f}" height="{ROW - 4}"/></g>'
                )
            parts.append(f'<text class="tick" x="{end + 6:.1f}" y="{y + ROW / 2 + 4:.1f}">{_text(words)}</text>')
            y += ROW
        y += 8
    parts.insert(0, f'<path class="axis" d="M{NAMES},2V{y - 6:.1f}"/>')
    return _svg(label, parts, WIDTH, y)


def distribution_chart(label: str, series: Sequence[Sequence[float]], *, x_label: str) -> str:
    """The share of values up to x, a step curve for each series; x over decades where they span a factor 20.

    Every value is in it: nothing is smoothed, no tail is cut.
    """
    series = [sorted(values) for values in series]
    everything = [v for values in series for v in values]
    if not everything:
        return ""
    x = logarithmic_axis(everything, LEFT, WIDTH - RIGHT) or linear_axis(
        min(everything), max(everything), LEFT, WIDTH - RIGHT, ticks=6
    )
    y = linear_axis(0.0, 1.0, HEIGHT - BOTTOM, TOP, ticks=4)
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick, text in ((0.0, "0"), (0.5, "50%"), (0.95, "95%"), (1.0, "")):
        at = y.pixel(tick)
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    parts += [
        f'<text class="tick" x="{x.pixel(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
        for tick, text in zip(x.ticks, x.labels())
    ]
    parts.append(f'<path class="axis" d="M{LEFT},{bottom}H{WIDTH - RIGHT}"/>')
    for colour, values in enumerate(series):
        if values:
            reached = {f"{x.pixel(v):.1f}": (i + 1) / len(values) for i, v in enumerate(values)}
            steps = "".join(f"H{at}V{y.pixel(share):.1f}" for at, share in reached.items())
            parts.append(f'<path class="line c{colour}" d="M{LEFT},{bottom}{steps}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{_text(x_label)}</text>')
    return _svg(label, parts, WIDTH, HEIGHT)


def _svg(label: str, parts: Sequence[str], width: float, height: float) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {math.ceil(height)}" role="img" aria-label="{_text(label)}">{body}</svg>'


def _text(text: str) -> str:
    return escape(visible(text))
