"""The table of ``halfbyte bench serve``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from halfbyte.bench.serve import ServeRow

__all__ = ["serve_table"]


def serve_table(rows: Sequence[ServeRow]) -> Table:
    """One line a way of answering."""
    table = Table("model", "precision", "answers", title="server beside bare engine", title_justify="left")
    for name in ("streams", "server tokens/s", "engine tokens/s", "server / engine", "time in steps"):
        table.add_column(name, justify="right")
    table.add_column("same tokens")
    for row in rows:
        table.add_row(
            row.model,
            row.precision,
            "streamed" if row.streamed else "whole",
            str(row.streams),
            f"{row.tokens_per_second:,.0f}",
            f"{row.engine_tokens_per_second:,.0f}",
            f"{row.ratio:.3f}",
            f"{row.step_share:.3f}",
            "yes" if row.same_tokens else "NO",
        )
    return table
