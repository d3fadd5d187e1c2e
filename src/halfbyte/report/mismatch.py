"""The pictures of the mismatch's sign structure, from numbers by step and from single tokens. No torch.

Colours of the four quadrants: (-,-) 1, (+,+) 3, (-,+) 0, (+,-) 2; where only direction matters, amplifying is 1 and
contracting 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from halfbyte.html.panel import Panel
from halfbyte.html.scale import number
from halfbyte.report.chart import Line, line_chart, stacked_chart
from halfbyte.report.plane import LEVELS, Bars, Cell, Outline, bar_chart, cell_chart, density_chart
from halfbyte.report.sample_tokens import SampleTokens

__all__ = ["QUADRANTS", "carpet", "gap_density", "indicator", "quadrant_stack", "weight_histogram"]

Points = Sequence[tuple[float, float]]

#: name in metrics, words, colour
QUADRANTS = (
    ("neg_neg", "A < 0, g < 0: amplifies, no floor", 1),
    ("pos_pos", "A > 0, g > 0: amplifies, limits itself", 3),
    ("neg_pos", "A < 0, g > 0: contracts", 0),
    ("pos_neg", "A > 0, g < 0: contracts", 2),
)
CARPET_ROWS, CARPET_COLUMNS, MOST_POINTS, BINS = 40, 256, 20_000, 40


def quadrant_stack(series: Sequence[Points]) -> Panel:
    """Update mass of the four quadrants over steps, in the order of ``QUADRANTS``; they share their steps."""
    known = {x for x, _ in series[0]} if series else set()
    for points in series:
        known &= {x for x, _ in points}
    steps = sorted(known)
    tables = [dict(points) for points in series]
    ordered = [[(x, max(0.0, table[x])) for x in steps] for table in tables]
    svg = stacked_chart(_totals(ordered), ordered, [colour for _, _, colour in QUADRANTS]) if steps else ""
    return Panel(
        "Update mass by quadrant",
        tuple((colour, words) for _, words, colour in QUADRANTS),
        "Share of sum |A| by the signs of advantage A and gap g. The two lower areas widen the mismatch.",
        svg,
    )


def indicator(share: Points, reward: Points) -> Panel:
    """Leading indicator (share of suspicious segments) above, reward below, over the same steps."""
    charts = [
        line_chart("Share of segments over the threshold", [Line(share, 1)], y_range=(0.0, 0.05)) if share else "",
        line_chart("Reward", [Line(reward, 0)]) if reward and share else "",
    ]
    return Panel(
        "Leading indicator and reward",
        ((1, "segments over the threshold"), (0, "mean reward")),
        "A rise above that comes before a fall below is damage that spreads.",
        "".join(charts),
    )


def carpet(samples: Sequence[SampleTokens]) -> Panel:
    """Samples by position, coloured by the direction of sign(A) g, selected segments outlined."""
    shown = [s for s in samples if any(g is not None for g in s.gap)][:CARPET_ROWS]
    columns = min(CARPET_COLUMNS, max((len(s.gap) for s in shown), default=0))
    sizes = sorted(abs(g) for s in shown for g, a in zip(s.gap, s.advantage) if g and a)
    scale = sizes[min(len(sizes) - 1, int(0.99 * len(sizes)))] if sizes else 1.0
    cells, outlines = [], []
    for row, sample in enumerate(shown):
        for column, (gap, advantage) in enumerate(zip(sample.gap[:columns], sample.advantage[:columns])):
            if gap and advantage:
                level = max(1, min(LEVELS, round(LEVELS * abs(gap) / scale)))
                cells.append(Cell(column, row, 1 if (gap > 0) == (advantage > 0) else 0, level))
        for chosen, run in groupby(range(min(columns, len(sample.selected))), key=lambda i: sample.selected[i]):
            places = list(run)
            if chosen:
                outlines.append(Outline(row, places[0], places[-1]))
    label = f"{len(shown)} responses by position; {len(outlines)} selected segments"
    svg = cell_chart(
        label, cells, columns=columns, rows=len(shown), outlines=outlines, x_label="position", y_label="sample"
    )
    note = f"Strongest colour at |g| = {number(scale)} nats. Frames: segments selected for repair." if cells else ""
    return Panel("Response carpet", ((1, "amplifies the gap"), (0, "contracts it")), note, svg if cells else "")


def gap_density(samples: Sequence[SampleTokens]) -> Panel:
    """Gap of tokens against their log-prob, coloured by direction."""
    points = [
        (p, g, 1 if a * g > 0 else 0)
        for s in samples
        for g, p, a in zip(s.gap, s.logp, s.advantage)
        if g is not None and p is not None and a
    ]
    points = points[:: -(-len(points) // MOST_POINTS) or 1]
    spread = bool(points) and max(abs(g) for _, g, _ in points) > 0
    x, y, colours = ([p[i] for p in points] for i in range(3))
    svg = ""
    if spread:
        label = f"Gap against log-prob of {len(points)} tokens"
        svg = density_chart(label, x, y, colours, x_label="rollout log-prob, nats", y_label="gap, nats (root scale)")  # type: ignore[arg-type]
    return Panel(
        "Gap against log-prob",
        ((1, "mostly amplifying"), (0, "mostly contracting")),
        "Numerical noise grows towards unlikely tokens; a tail at likely ones is something else.",
        svg,
    )


def weight_histogram(samples: Sequence[SampleTokens], correction: str = "") -> Panel:
    """Weights that a correction gave, and the share of update mass that it kept."""
    pairs = [
        (w, abs(a)) for s in samples if s.weight is not None for w, a in zip(s.weight, s.advantage) if a is not None
    ]
    title, total = f"Weights of {correction or 'the correction'}", sum(a for _, a in pairs)
    if not pairs or all(w == 1.0 for w, _ in pairs):
        return Panel(title, (), "", "")
    top = max(1.0, *(w for w, _ in pairs))
    counts = [0] * BINS
    for weight, _ in pairs:
        counts[min(BINS - 1, int(BINS * weight / top))] += 1
    edges = [top * i / BINS for i in range(BINS + 1)]
    kept = sum(w * a for w, a in pairs) / total if total else 1.0
    svg = bar_chart(title, Bars(edges, [c / len(pairs) for c in counts]), x_label="weight", y_label="share of tokens")
    changed = sum(w != 1.0 for w, _ in pairs) / len(pairs)
    note = f"Mass kept: {100 * kept:.1f}% of sum |A|. {100 * changed:.1f}% of tokens have a weight other than 1."
    return Panel(title, (), note, svg)


def _totals(series: Sequence[Points]) -> str:
    parts = []
    for (_, words, _), points in zip(QUADRANTS, series):
        mean = sum(y for _, y in points) / len(points) if points else 0.0
        parts.append(f"{words}: mean {number(mean)}")
    return "; ".join(parts)
