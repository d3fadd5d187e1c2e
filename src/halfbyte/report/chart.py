"""Charts as inline SVG: lines, points with intervals, stacked areas. Colours are CSS classes: the page decides them.

The SVG carries no reference of any kind and no text but numbers and labels of ours, escaped all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from halfbyte.html.scale import Axis, linear_axis, logarithmic_axis, number

__all__ = ["Band", "Line", "Point", "line_chart", "smooth", "stacked_chart", "thin"]

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 34
#: More points than pixels say nothing: longer series are averaged into this many.
MOST_POINTS = 300


@dataclass(frozen=True)
class Line:
    """A series. ``colour`` is a number of the page's palette; a ``faint`` line stands behind its smoothed twin."""

    points: Points
    colour: int = 0
    faint: bool = False


@dataclass(frozen=True)
class Point:
    """A measurement with an interval."""

    x: float
    y: float
    low: float
    high: float
    colour: int = 0
    note: str = ""


@dataclass(frozen=True)
class Band:
    """An area between two series that share their x."""

    lower: Points
    upper: Points
    colour: int = 0


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points: means of equal runs of neighbours, in order."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def smooth(points: Points, window: int) -> list[tuple[float, float]]:
    """A centred moving mean over ``window`` points (fewer at the ends)."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    half, n = window // 2, len(points)
    spans = [(max(0, i - half), min(n, i + half + 1)) for i in range(n)]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, spans)]


def line_chart(
    label: str,
    lines: Sequence[Line],
    points: Sequence[Point] = (),
    bands: Sequence[Band] = (),
    *,
    y_range: tuple[float, float] | None = None,
    logarithmic: bool = False,
) -> str:
    """An SVG with steps along x.

    Arguments:
        label: what a reader who cannot see the chart is told.
        y_range: a range that must be visible (such as 0 to 1 for accuracies).
        logarithmic: over decades where the values span a factor 20; values that are not positive are then gaps.
    """
    lines = [Line(thin(line.points), line.colour, line.faint) for line in lines if line.points]
    bands = [Band(thin(band.lower), thin(band.upper), band.colour) for band in bands]
    areas = [points for band in bands for points in (band.lower, band.upper)]
    xs = [x for line in lines for x, _ in line.points] + [p.x for p in points] + [x for area in areas for x, _ in area]
    ys = [y for line in lines for _, y in line.points] + [y for p in points for y in (p.low, p.high, p.y)]
    ys += [y for area in areas for _, y in area] + list(y_range or ())
    if not xs:
        return ""
    bottom, top = HEIGHT - BOTTOM, TOP
    y = (logarithmic_axis(ys, bottom, top) if logarithmic else None) or linear_axis(min(ys), max(ys), bottom, top)
    x = _steps_axis(xs)
    parts = [_frame(x, y)]
    for band in bands:
        outline = [*band.upper, *reversed(band.lower)]
        parts.append(f'<path class="fill c{band.colour}" d="M{_path(outline, x, y)}Z"/>')
    for line in lines:
        kind = "line faint" if line.faint else "line"
        for run in _runs(line.points, positive=y.logarithmic):
            if len(run) == 1:
                (px, py) = run[0]
                parts.append(
                    f'<circle class="dot c{line.colour}" cx="{x.pixel(px):.1f}" cy="{y.pixel(py):.1f}" r="2.5"/>'
                )
            else:
                parts.append(f'<path class="{kind} c{line.colour}" d="M{_path(run, x, y)}"/>')
    parts += [_measurement(p, x, y) for p in points]
    return _svg(label, parts)


def stacked_chart(label: str, series: Sequence[Points], colours: Sequence[int] | None = None) -> str:
    """Areas on top of each other, the first at the bottom. All series share their x, values are not negative.

    Arguments:
        colours: of each series; 0, 1, 2, ... by default.
    """
    series = [thin(points) for points in series]
    if not series or not series[0]:
        return ""
    xs = [x for x, _ in series[0]]
    if len(xs) == 1:  # an area needs a width
        xs = [xs[0] - 0.5, xs[0] + 0.5]
        series = [[(at, points[0][1]) for at in xs] for points in series]
    levels = [[0.0] * len(xs)]
    for points in series:
        levels.append([below + value for below, (_, value) in zip(levels[-1], points)])
    x, y = _steps_axis(xs), linear_axis(0.0, max(levels[-1]), HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y)]
    for i, colour in enumerate(colours or range(len(series))):
        lower, upper = list(zip(xs, levels[i])), list(zip(xs, levels[i + 1]))
        parts.append(f'<path class="area c{colour}" d="M{_path([*upper, *reversed(lower)], x, y)}Z"/>')
    return _svg(label, parts)


def _runs(points: Points, *, positive: bool) -> list[list[tuple[float, float]]]:
    """The points as one run, or, where only positive values can be drawn, cut at the others."""
    if not positive:
        return [list(points)]
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point[1] > 0:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _steps_axis(xs: Sequence[float]) -> Axis:
    low, high = min(xs), max(xs)
    axis = linear_axis(low, high, LEFT, WIDTH - RIGHT, ticks=6, whole=True)
    if high == low:
        return axis
    return Axis(low, high, LEFT, WIDTH - RIGHT, tuple(t for t in axis.ticks if low <= t <= high))


def _frame(x: Axis, y: Axis) -> str:
    parts = []
    for tick, label in zip(y.ticks, y.labels()):
        at = y.pixel(tick)
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    bottom = HEIGHT - BOTTOM
    for tick in x.ticks:
        parts.append(
            f'<text class="tick" x="{x.pixel(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT},{bottom}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'
    )
    if y.logarithmic:
        parts.append(f'<text class="tick" x="{LEFT + 4}" y="{TOP + 8}">log scale</text>')
    return "".join(parts)


def _path(points: Points, x: Axis, y: Axis) -> str:
    return "L".join(f"{x.pixel(px):.1f},{y.pixel(py):.1f}" for px, py in points)


def _measurement(p: Point, x: Axis, y: Axis) -> str:
    at, low, high = x.pixel(p.x), y.pixel(p.low), y.pixel(p.high)
    return (
        f'<g><title>{escape(p.note)}</title><path class="whisker c{p.colour}" d="M{at:.1f},{low:.1f}V{high:.1f}'
        f'M{at - 4:.1f},{low:.1f}h8M{at - 4:.1f},{high:.1f}h8"/>'
        f'<circle class="dot c{p.colour}" cx="{at:.1f}" cy="{y.pixel(p.y):.1f}" r="3.5"/></g>'
    )


def _svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
