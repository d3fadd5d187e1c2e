"""Charts whose axes are not steps: cells over a plane, and bars. Inline SVG, colours by CSS class as in ``chart.py``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from halfbyte.html.scale import Axis, linear_axis, number

__all__ = ["Bars", "Cell", "Outline", "bar_chart", "cell_chart", "density_chart"]

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 34
#: opacities of a colour, from weak to strong; a value's level is one of 1..LEVELS
LEVELS = 5


@dataclass(frozen=True)
class Cell:
    """A unit square of a grid: column, row (0 at the top), colour of the page's palette, level 1..``LEVELS``."""

    column: int
    row: int
    colour: int
    level: int


@dataclass(frozen=True)
class Outline:
    """A frame around columns ``first`` .. ``last`` (both included) of a row."""

    row: int
    first: int
    last: int


@dataclass(frozen=True)
class Bars:
    """A histogram: ``shares[i]`` lies between ``edges[i]`` and ``edges[i + 1]``."""

    edges: Sequence[float]
    shares: Sequence[float]
    colour: int = 0


def cell_chart(
    label: str,
    cells: Iterable[Cell],
    *,
    columns: int,
    rows: int,
    outlines: Sequence[Outline] = (),
    x_label: str = "",
    y_label: str = "",
) -> str:
    """A grid of coloured cells, one SVG path for each colour and level; empty without rows or columns."""
    if rows < 1 or columns < 1:
        return ""
    wide, high = (WIDTH - LEFT - RIGHT) / columns, (HEIGHT - TOP - BOTTOM) / rows
    parts = [f'<path class="axis" d="M{LEFT},{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>']
    paths: dict[tuple[int, int], list[str]] = defaultdict(list)
    for cell in cells:
        paths[cell.colour, cell.level].append(f"M{cell.column} {cell.row}h1v1h-1z")
    drawn = "".join(
        f'<path class="cell c{colour} l{level}" d="{"".join(runs)}"/>'
        for (colour, level), runs in sorted(paths.items())
    )
    parts.append(f'<g transform="translate({LEFT},{TOP}) scale({wide:.4f},{high:.4f})">{drawn}</g>')
    for outline in outlines:
        x, y = LEFT + outline.first * wide, TOP + outline.row * high
        width = (outline.last - outline.first + 1) * wide
        parts.append(f'<rect class="outline" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{high:.1f}"/>')
    step = linear_axis(0, columns, LEFT, WIDTH - RIGHT, ticks=6, whole=True)
    scale = Axis(0, columns, LEFT, WIDTH - RIGHT, tuple(t for t in step.ticks if 0 <= t <= columns))
    parts.append(_x_ticks(scale))
    return _svg(label, [*parts, _labels(x_label, y_label)])


def density_chart(
    label: str, x: Sequence[float], y: Sequence[float], colours: Sequence[int], *, x_label: str, y_label: str
) -> str:
    """Points as a density: cells of a 60 x 40 grid, stronger where there are more points (on a logarithmic scale).

    Heights are on a signed square-root scale, so that a tail does not squeeze the bulk into one line.

    Arguments:
        colours: of each point; a cell takes the colour that most of its points have.
    """
    if not x:
        return ""
    across, up = 60, 40
    horizontal = linear_axis(min(x), max(x), LEFT, WIDTH - RIGHT, ticks=6)
    roots = [math.copysign(abs(value) ** 0.5, value) for value in y]
    vertical = linear_axis(min(roots), max(roots), HEIGHT - BOTTOM, TOP)
    counts: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for px, py, colour in zip(x, roots, colours):
        column = min(across - 1, int(across * (px - horizontal.low) / (horizontal.high - horizontal.low)))
        row = min(up - 1, int(up * (vertical.high - py) / (vertical.high - vertical.low)))
        counts[column, row][colour] += 1
    most = max(sum(found.values()) for found in counts.values())
    wide, high = (WIDTH - LEFT - RIGHT) / across, (HEIGHT - TOP - BOTTOM) / up
    paths: dict[tuple[int, int], list[str]] = defaultdict(list)
    for (column, row), found in counts.items():
        total = sum(found.values())
        level = LEVELS if most == 1 else 1 + round((LEVELS - 1) * _log_share(total, most))
        paths[max(found, key=lambda c: (found[c], -c)), level].append(f"M{column} {row}h1v1h-1z")
    drawn = "".join(
        f'<path class="cell c{colour} l{level}" d="{"".join(runs)}"/>'
        for (colour, level), runs in sorted(paths.items())
    )
    parts = [_grid(vertical, [number(t * abs(t)) for t in vertical.ticks]), _x_ticks(horizontal)]
    parts.append(f'<g transform="translate({LEFT},{TOP}) scale({wide:.4f},{high:.4f})">{drawn}</g>')
    return _svg(label, [*parts, _labels(x_label, y_label)])


def bar_chart(label: str, bars: Bars, *, x_label: str, y_label: str = "share") -> str:
    """Bars over a linear axis; the height is the share's square root, so that rare values are seen."""
    if not bars.shares:
        return ""
    horizontal = linear_axis(bars.edges[0], bars.edges[-1], LEFT, WIDTH - RIGHT, ticks=6)
    ticks = (0.0, 0.01, 0.05, 0.25, 0.5, 1.0)
    top = max(bars.shares) or 1.0
    vertical = Axis(0.0, top**0.5, HEIGHT - BOTTOM, TOP, tuple(t**0.5 for t in ticks if t <= top))
    parts = [_grid(vertical, [number(tick * tick) for tick in vertical.ticks])]
    bottom = vertical.pixel(0.0)
    for left, right, share in zip(bars.edges, bars.edges[1:], bars.shares):
        a, b, y = horizontal.pixel(left), horizontal.pixel(right), vertical.pixel(share**0.5)
        if share > 0:
            parts.append(
                f'<path class="area c{bars.colour}" d="M{a:.1f},{bottom:.1f}V{y:.1f}H{max(b - 0.5, a + 0.5):.1f}V{bottom:.1f}Z"/>'
            )
    return _svg(label, [*parts, _x_ticks(horizontal), _labels(x_label, y_label)])


def _log_share(total: int, most: int) -> float:
    return (total.bit_length() - 1) / max(1, most.bit_length() - 1)


def _grid(y: Axis, labels: Sequence[str]) -> str:
    parts = []
    for tick, label in zip(y.ticks, labels):
        at = y.pixel(tick)
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    return "".join(parts)


def _x_ticks(x: Axis) -> str:
    y = HEIGHT - BOTTOM + 16
    return "".join(
        f'<text class="tick" x="{x.pixel(t):.1f}" y="{y}" text-anchor="middle">{label}</text>'
        for t, label in zip(x.ticks, x.labels())
    )


def _labels(x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts = [f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>']
    if y_label:
        at = (TOP + HEIGHT - BOTTOM) / 2
        turned = f'transform="rotate(-90 11 {at})"'
        parts.append(f'<text class="tick" x="11" y="{at}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return "".join(parts)


def _svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
