"""Rows as tables on the terminal, and as one JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from halfbyte.bench.case import KernelRow
from halfbyte.bench.memory import MemoryRow
from halfbyte.bench.rollout import RolloutRow
from halfbyte.bench.trace import TraceRow
from halfbyte.bench.triage import SelectionRow, SpeedRow

__all__ = [
    "heading",
    "kernel_table",
    "memory_table",
    "rollout_table",
    "selection_table",
    "show",
    "size_table",
    "speed_table",
    "trace_table",
    "write_json",
]


def heading(facts: Mapping[str, Any]) -> str:
    """One paragraph on what the numbers were measured on."""
    waiting = " ".join(f"{k}={v}" for k, v in facts["waiting"].items()) or "library defaults"
    load = "" if facts["load"] is None else f"; load {facts['load']:.1f} on {facts['cores']} cores"
    return (
        f"kernels {facts['kernels']} on {facts['kernel_threads']} threads, torch {facts['torch']} on "
        f"{facts['torch_threads']} ({waiting}){load}. Medians over rounds in which the sides take turns; "
        "± is half the inter-quartile range."
    )


def kernel_table(rows: Sequence[KernelRow]) -> Table:
    """One line a comparison."""
    table = Table("kernel", "n", "k", "m", title="kernels", title_justify="left")
    for name in ("ms", "baseline ms", "times faster", "relative error"):
        table.add_column(name, justify="right")
    table.add_column("baseline")
    table.add_column("MiB rotated", justify="right")
    table.add_column("also")
    for row in rows:
        facts = row.facts
        table.add_row(
            row.kernel,
            *(str(v) for v in (row.n, row.k, row.m)),
            _spread(row.milliseconds, facts["milliseconds_quartiles"]),
            _spread(row.baseline_milliseconds, facts["baseline_milliseconds_quartiles"]),
            f"{row.ratio:.2f}",
            f"{row.relative_error:.1e}",
            row.baseline,
            f"{facts['working_set_mib']:.0f} : {facts['baseline_working_set_mib']:.0f}",
            _also(facts),
        )
    return table


def rollout_table(rows: Sequence[RolloutRow]) -> Table:
    """One line a precision, batch and baseline."""
    table = Table("model", "precision", title="decoding", title_justify="left")
    for name in ("batch", "tokens/s", "baseline tokens/s", "times faster"):
        table.add_column(name, justify="right")
    table.add_column("baseline")
    table.add_column("same tokens")
    for row in rows:
        table.add_row(
            row.model,
            row.precision,
            str(row.batch),
            _spread(row.tokens_per_second, row.tokens_per_second_quartiles),
            _spread(row.baseline_tokens_per_second, row.baseline_tokens_per_second_quartiles),
            f"{row.ratio:.2f}",
            row.baseline,
            "yes" if row.same_tokens else "NO",
        )
    return table


def memory_table(rows: Sequence[MemoryRow]) -> Table:
    """One line a precision."""
    table = Table("model", "precision", title="resident weights", title_justify="left")
    for name in ("MiB", "predicted MiB", "measured / predicted", "FP4 matrices / BF16"):
        table.add_column(name, justify="right")
    for row in rows:
        share = row.quantised_ratio
        table.add_row(
            row.model,
            row.precision,
            f"{row.measured_bytes / 2**20:.1f}",
            f"{row.predicted_bytes / 2**20:.1f}",
            f"{row.ratio:.3f}",
            "" if share is None else f"{share:.4f}",
        )
    return table


def trace_table(rows: Sequence[TraceRow]) -> Table:
    """One line a way of guiding; shares are of the first line of the same precision and products."""
    table = Table("model", "precision", "products", "method", title="gap of learner and rollout", title_justify="left")
    for name in ("bits", "sites", "layers", "routes"):
        table.add_column(name)
    for name in ("k3 KL", "of none", "mean |gap|", "of none", "codes differ", "bytes/token", "step s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            row.precision,
            row.products,
            row.method,
            str(row.payload_bits or ""),
            row.sites,
            row.layers,
            "replayed" if row.router_replay else "live",
            f"{row.k3_kl:.2e}",
            f"{100 * row.share_k3:.3g}%",
            f"{row.mean_abs_gap:.2e}",
            f"{100 * row.share_gap:.3g}%",
            "" if row.code_mismatch != row.code_mismatch else f"{100 * row.code_mismatch:.2f}%",
            f"{row.bytes_per_token:.0f}",
            f"{row.step_seconds:.2f}",
        )
    return table


def size_table(rows: Sequence[Mapping[str, str | float]]) -> Table:
    """One line a model and setting."""
    table = Table("model", "guided", "bits", title="guidance of large models, by the formula", title_justify="left")
    for name in ("bytes/token", "with global scales", "GiB per million tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["model"]),
            str(row["setting"]),
            str(row["bits"]),
            f"{row['bytes_per_token']:,.0f}",
            f"{row['with_global_scales']:,.0f}",
            f"{row['gib_per_million_tokens']:.1f}",
        )
    return table


def selection_table(rows: Sequence[SelectionRow], title: str) -> Table:
    """One line a scenario, one column a method: F1 (precision, recall), or batches touched where nothing is damaged."""
    methods = list(dict.fromkeys(row.method for row in rows))
    table = Table("scenario", title=title, title_justify="left")
    for name in methods:
        table.add_column(name, justify="right")
    cells = {(row.scenario, row.method): _scores(row) for row in rows}
    for scenario in dict.fromkeys(row.scenario for row in rows):
        table.add_row(scenario, *(cells[scenario, name] for name in methods))
    return table


def _scores(row: SelectionRow) -> str:
    if row.f1 is None:
        return f"{row.touched} of {row.batches}, {row.selected:.0f} tokens"
    if row.mode == "rank":  # as many selected as damaged: precision and recall are F1
        return f"{row.f1:.2f}"
    return f"{row.f1:.2f} ({0.0 if row.precision is None else row.precision:.2f}, {row.recall:.2f})"


def speed_table(rows: Sequence[SpeedRow]) -> Table:
    """One line a segmenter."""
    table = Table("segmenter", title="CPU seconds on one thread", title_justify="left")
    for name in ("tokens", "segments", "correction", "quadrants", "sum"):
        table.add_column(name, justify="right")
    for row in rows:
        parts = row.segment, row.correct, row.quadrants
        table.add_row(row.method, f"{row.tokens:,}", *(f"{part:.3f}" for part in (*parts, sum(parts))))
    return table


def show(parts: Iterable[Table | str]) -> None:
    """Print to standard output; where that is no terminal, lines are as long as they need to be."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    for part in parts:
        console.print(part)


def write_json(path: Path, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """``{"machine": ..., "rows": [...], ...}``; the file appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"machine": facts, "rows": rows, **more}, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _also(facts: Mapping[str, Any]) -> str:
    if "gelem_per_second_per_thread" in facts:
        return f"{facts['gelem_per_second_per_thread']:.2f} Gelem/s/thread"
    return f"capacity {facts['capacity_ratio']:.2f}x" if "capacity_ratio" in facts else ""


def _spread(value: float, quartiles: Sequence[float]) -> str:
    digits = 4 if value < 1 else 3 if value < 10 else 1
    return f"{value:.{digits}f} ±{(quartiles[1] - quartiles[0]) / 2:.{digits}f}"
