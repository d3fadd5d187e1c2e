"""``halfbyte diagnose``: numbers and pictures of the mismatch, from a run or from any trainer's trajectories."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.cli.parameter import flag

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from halfbyte.diagnosis import Diagnosis
    from halfbyte.report.sample_tokens import SampleTokens

__all__ = ["diagnose"]


def diagnose(
    source: Annotated[Path, Parameter(help="Run folder, or a .jsonl or .parquet file with one response a row.")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="HTML file with the pictures; none by default.")] = None,
    json: Annotated[Path | None, Parameter(help="Also write the numbers of every step to this file.")] = None,
    step: Annotated[int | None, Parameter(help="Step to show; the last one by default.")] = None,
    column: Annotated[
        tuple[str, ...], Parameter("--column"), flag("NAME=COLUMN, where a file has its own names; may be repeated.")
    ] = (),
    segments: Annotated[
        str | None, Parameter(help="How responses are cut into segments: turn, delimiter, fixed or change_point.")
    ] = None,
    tokenizer: Annotated[
        str | None, Parameter(help="Model folder (or tiny), whose tokenizer says which tokens are delimiters.")
    ] = None,
    correction: Annotated[str, Parameter(help="Correction whose weights are pictured.")] = "triage",
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
) -> int:
    """Show how rollout and learner differ: size of the gap, which updates amplify it, and what corrections would do."""
    thread_policy.apply(threads)

    from halfbyte import diagnosis
    from halfbyte.diagnosis.overview import chosen_table, text_tables
    from halfbyte.objective import make_correction

    tables = diagnosis.read_tables(source, diagnosis.parse_columns(column))
    shown = chosen_table(tables, step)
    options = {"reference": "batch"} if correction == "triage" else {}
    rule = make_correction(correction, **options)
    cut, delimiters = diagnosis.segmentation(segments, tokenizer)
    found = diagnosis.diagnose(shown, segmenter=cut, delimiters=delimiters, correction=rule)
    if json is None and out is None:
        steps: list[Diagnosis] = [found]
    else:
        steps = [
            found if t is shown else diagnosis.diagnose(t, segmenter=cut, delimiters=delimiters, compare=())
            for t in tables
        ]
    titled = text_tables(found)
    for title, rows in titled:
        _print(title, rows)
    if json is not None:
        _write(json, json_module.dumps([_row(d) for d in steps], indent=2) + "\n")
    if out is not None:
        _write(out, _page(str(source), found, steps, titled, correction))
        print(out)
    return 0


def _page(
    source: str, found: Diagnosis, steps: list[Diagnosis], tables: list[tuple[str, list[list[str]]]], correction: str
) -> str:
    from halfbyte.diagnosis.overview import facts
    from halfbyte.html.table import Table
    from halfbyte.report import diagnosis as page
    from halfbyte.report import mismatch

    def series(key: str) -> list[tuple[float, float]]:
        return [
            (float(i if d.table.step is None else d.table.step), d.numbers[key])
            for i, d in enumerate(steps)
            if key in d.numbers
        ]

    samples = _samples(found)
    panels = [
        mismatch.quadrant_stack([series(f"quadrant/mass_{name}") for name, _, _ in mismatch.QUADRANTS]),
        mismatch.carpet(samples),
        mismatch.gap_density(samples),
        mismatch.weight_histogram(samples, correction),
        mismatch.indicator(series("segment/over_threshold"), series("reward/mean")),
    ]
    shown = [Table(title, rows) for title, rows in tables]
    return page.render_diagnosis(page.DiagnosisPage(source, facts(found), panels, shown))


def _samples(found: Diagnosis) -> list[SampleTokens]:
    from halfbyte.report.sample_tokens import SampleTokens

    table, out, start = found.table, [], 0
    gap = table.gap
    for length in table.lengths.tolist():
        part = slice(start, start + length)
        mask = table.mask[part].tolist()

        def seen(values: npt.NDArray[np.float32], part: slice = part, mask: list[bool] = mask) -> list[float | None]:
            return [x if m else None for x, m in zip(values[part].tolist(), mask)]

        out.append(
            SampleTokens(
                gap=seen(gap),
                logp=seen(table.rollout_logp),
                advantage=seen(table.advantages),
                weight=found.weights[part].tolist(),
                selected=found.selected[part].tolist(),
            )
        )
        start += length
    return out


def _row(found: Diagnosis) -> dict[str, Any]:
    from dataclasses import asdict

    effects = {name: asdict(effect) for name, effect in found.effects.items()}
    return {"step": found.table.step, **found.numbers, **({"corrections": effects} if effects else {})}


def _print(title: str, rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows[1:]:
        table.add_row(*row)
    Console(soft_wrap=True).print(table)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
