"""Tables of the injection study: harm of each quadrant, and what corrections recover, with intervals over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from halfbyte.bench.injection import CLEAN, Cell, Difference, differences

__all__ = ["injection_tables"]


def injection_tables(rows: Mapping[Cell, Mapping[str, Any]]) -> list[Table]:
    """Points of held-out accuracy: against the run without injection, and against the same quadrant uncorrected."""
    harm = differences(rows, against=lambda cell: Cell(cell.seed, CLEAN, "none"))
    gain = differences(
        {cell: row for cell, row in rows.items() if cell.quadrant != CLEAN},
        against=lambda cell: replace(cell, correction="none"),
    )
    return [
        _table("against the run without injection", harm),
        _table("against the same quadrant without correction", (d for d in gain if d.correction != "none")),
    ]


def _table(title: str, found: Any) -> Table:
    table = Table("quadrant (A, g)", "correction", title=title, title_justify="left")
    for name in ("seeds", "accuracy", "points", "95% interval"):
        table.add_column(name, justify="right")
    for d in found:
        table.add_row(d.quadrant, d.correction, str(d.seeds), f"{d.accuracy:.3f}", f"{100 * d.mean:+.1f}", _range(d))
    return table


def _range(d: Difference) -> str:
    if d.seeds < 2:
        return "one seed"
    return f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
