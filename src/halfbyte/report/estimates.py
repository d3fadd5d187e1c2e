"""Charts of a study: estimates with intervals by name, accuracy against cost, small curves. Inline SVG as in ``chart.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from halfbyte.html.scale import Axis, linear_axis, logarithmic_axis, number

__all__ = ["Interval", "Small", "Spot", "forest_chart", "scatter_chart", "small_multiples"]

WIDTH = 440
ROW, TOP, BOTTOM, RIGHT = 20, 10, 34, 14
NAMES, LONGEST_NAME = 112, 16
#: a cell of small multiples, and what of it is kept for words
CELL_WIDTH, CELL_HEIGHT, COLUMNS, HEAD, GUTTER = 146, 92, 3, 16, 34


@dataclass(frozen=True)
class Interval:
    """A named estimate; ``wide`` is a second, wider interval drawn thin. None where there is no interval."""

    name: str
    mean: float
    inner: tuple[float, float] | None
    wide: tuple[float, float] | None = None
    colour: int = 0


@dataclass(frozen=True)
class Spot:
    """A named point with intervals in both directions (None: no interval)."""

    name: str
    x: float
    y: float
    x_range: tuple[float, float] | None
    y_range: tuple[float, float] | None
    colour: int = 0


@dataclass(frozen=True)
class Small:
    """A named curve: (x, mean, least, most)."""

    name: str
    points: Sequence[tuple[float, float, float, float]]


def forest_chart(label: str, rows: Sequence[Interval], *, x_label: str, line: float | None = None) -> str:
    """One row an estimate, with a vertical line at ``line``; empty without rows."""
    if not rows:
        return ""
    values = [v for r in rows for v in (r.mean, *(r.inner or ()), *(r.wide or ()))] + ([] if line is None else [line])
    x = linear_axis(min(values), max(values), NAMES, WIDTH - RIGHT, ticks=5)
    bottom = TOP + ROW * len(rows)
    parts = _vertical_grid(x, bottom)
    if line is not None:
        parts.append(f'<path class="axis" d="M{x.pixel(line):.1f},{TOP}V{bottom}"/>')
    for i, row in enumerate(rows):
        y = TOP + ROW * i + ROW / 2
        parts.append(f"<g><title>{escape(_words(row))}</title>{_name(row.name, NAMES - 8, y + 4)}")
        if row.wide is not None:
            parts.append(_bar(x, y, row.wide, "line faint", row.colour))
        if row.inner is not None:
            parts.append(_bar(x, y, row.inner, "line", row.colour))
        parts.append(f'<circle class="dot c{row.colour}" cx="{x.pixel(row.mean):.1f}" cy="{y:.1f}" r="3.5"/></g>')
    parts.append(_x_label(x_label, (NAMES + WIDTH - RIGHT) / 2, bottom + BOTTOM - 4))
    return _svg(label, parts, WIDTH, bottom + BOTTOM)


def scatter_chart(label: str, spots: Sequence[Spot], *, x_label: str, y_label: str, front: Sequence[str] = ()) -> str:
    """Named points with whiskers; those of ``front`` are joined in the order of x. Empty without points."""
    if not spots:
        return ""
    left, height = 50, 300
    xs = [v for s in spots for v in (s.x, *(s.x_range or ()))]
    ys = [v for s in spots for v in (s.y, *(s.y_range or ()))]
    x = linear_axis(min(xs), max(xs), left, WIDTH - RIGHT - 60, ticks=5)
    y = linear_axis(min(ys), max(ys), height - BOTTOM, TOP)
    parts = []
    for tick, text in zip(y.ticks, y.labels()):
        at = y.pixel(tick)
        parts.append(f'<path class="grid" d="M{left},{at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for tick, text in zip(x.ticks, x.labels()):
        parts.append(
            f'<text class="tick" x="{x.pixel(tick):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{text}</text>'
        )
    best = sorted((s for s in spots if s.name in front), key=lambda s: s.x)
    if len(best) > 1:
        joined = "L".join(f"{x.pixel(s.x):.1f},{y.pixel(s.y):.1f}" for s in best)
        parts.append(f'<path class="line faint c1" d="M{joined}"/>')
    for s in spots:
        px, py = x.pixel(s.x), y.pixel(s.y)
        parts.append(f"<g><title>{escape(f'{s.name}: {number(s.x)}, {number(s.y)}')}</title>")
        if s.x_range is not None:
            parts.append(
                f'<path class="whisker c{s.colour}" d="M{x.pixel(s.x_range[0]):.1f},{py:.1f}H{x.pixel(s.x_range[1]):.1f}"/>'
            )
        if s.y_range is not None:
            parts.append(
                f'<path class="whisker c{s.colour}" d="M{px:.1f},{y.pixel(s.y_range[0]):.1f}V{y.pixel(s.y_range[1]):.1f}"/>'
            )
        parts.append(f'<circle class="dot c{s.colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>')
        parts.append(f'<text class="tick" x="{px + 6:.1f}" y="{py - 5:.1f}">{escape(_short(s.name))}</text></g>')
    parts.append(_x_label(x_label, (left + WIDTH - RIGHT) / 2, height - 4))
    turned = f'transform="rotate(-90 11 {height / 2})"'
    parts.append(f'<text class="tick" x="11" y="{height / 2}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return _svg(label, parts, WIDTH, height)


def small_multiples(
    label: str,
    curves: Sequence[Small],
    *,
    reference: Small | None = None,
    logarithmic: bool = False,
    zero: bool = False,
) -> str:
    """A small chart for each curve, all on the same axes, with the reference's mean faint in every one.

    Arguments:
        logarithmic: over decades where the values span a factor 20; values that are not positive are then left out.
        zero: 0 must be visible.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    everything = [p for curve in curves for p in curve.points]
    values = [v for p in everything for v in p[1:]] + ([0.0] if zero else [])
    steps = [p[0] for p in everything]
    rows = -(-len(curves) // COLUMNS)
    parts = []
    for i, curve in enumerate(curves):
        left = (i % COLUMNS) * CELL_WIDTH + GUTTER
        top = (i // COLUMNS) * CELL_HEIGHT + HEAD
        right, bottom = left + CELL_WIDTH - GUTTER - 6, top + CELL_HEIGHT - HEAD - 18
        x = Axis(min(steps), max(max(steps), min(steps) + 1), left, right, ())
        y = (logarithmic_axis(values, bottom, top) if logarithmic else None) or linear_axis(
            min(values), max(values), bottom, top, ticks=2
        )
        parts.append(f'<text class="tick" x="{left}" y="{top - 4}">{escape(_short(curve.name))}</text>')
        parts.append(f'<path class="axis" d="M{left},{bottom}H{right}"/>')
        ends = dict.fromkeys((y.ticks[0], y.ticks[-1]))
        for tick in ends:
            parts.append(f'<path class="grid" d="M{left},{y.pixel(tick):.1f}H{right}"/>')
            parts.append(
                f'<text class="tick" x="{left - 3}" y="{y.pixel(tick) + 4:.1f}" text-anchor="end">{number(tick, 2)}</text>'
            )
        if i // COLUMNS == rows - 1:
            parts.append(
                f'<text class="tick" x="{right}" y="{bottom + 14}" text-anchor="end">{number(max(steps))}</text>'
            )
        band = [p for p in curve.points if not y.logarithmic or p[2] > 0]
        if len(band) > 1:
            outline = [(p[0], p[3]) for p in band] + [(p[0], p[2]) for p in reversed(band)]
            parts.append(f'<path class="fill c0" d="M{_path(outline, x, y)}Z"/>')
        if reference is not None and reference.name != curve.name:
            parts += _curve(reference, x, y, "line faint c1")
        parts += _curve(curve, x, y, "line c0")
    return _svg(label, parts, COLUMNS * CELL_WIDTH, rows * CELL_HEIGHT)


def _curve(curve: Small, x: Axis, y: Axis, kind: str) -> list[str]:
    points = [(p[0], p[1]) for p in curve.points if not y.logarithmic or p[1] > 0]
    if len(points) == 1:
        colour = kind.split()[-1]
        return [
            f'<circle class="dot {colour}" cx="{x.pixel(points[0][0]):.1f}" cy="{y.pixel(points[0][1]):.1f}" r="2"/>'
        ]
    return [f'<path class="{kind}" d="M{_path(points, x, y)}"/>'] if points else []


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    return "L".join(f"{x.pixel(px):.1f},{y.pixel(py):.1f}" for px, py in points)


def _vertical_grid(x: Axis, bottom: float) -> list[str]:
    parts = []
    for tick, text in zip(x.ticks, x.labels()):
        at = x.pixel(tick)
        parts.append(f'<path class="grid" d="M{at:.1f},{TOP}V{bottom}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    return parts


def _bar(x: Axis, y: float, ends: tuple[float, float], kind: str, colour: int) -> str:
    return f'<path class="{kind} c{colour}" d="M{x.pixel(ends[0]):.1f},{y:.1f}H{x.pixel(ends[1]):.1f}"/>'


def _name(name: str, x: float, y: float) -> str:
    return f'<text class="tick" x="{x}" y="{y:.1f}" text-anchor="end">{escape(_short(name))}</text>'


def _words(row: Interval) -> str:
    text = f"{row.name}: {number(row.mean)}"
    return text if row.inner is None else f"{text}, {number(row.inner[0])} to {number(row.inner[1])}"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _x_label(text: str, x: float, y: float) -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _svg(label: str, parts: Sequence[str], width: float, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {width} {math.ceil(height)}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
