"""The page of a trial: the verdict first, then what it rests on; one HTML file that loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from halfbyte.html.page import render
from halfbyte.html.panel import Panel
from halfbyte.html.table import Table
from halfbyte.html.text import flatten
from halfbyte.trial.integrity import Finding
from halfbyte.trial.records import ARMS
from halfbyte.trial.report.arms import arm_tables, latencies, tag_table
from halfbyte.trial.report.cases import case, named, task_table
from halfbyte.trial.report.charts import Bar, bars_chart, distribution_chart
from halfbyte.trial.report.content import (
    arm_name,
    cost_table,
    facts,
    latency_table,
    memory_lines,
    noise_lines,
    verdict,
)
from halfbyte.trial.report.dimensions import NOT_EVALUATED, dimensions
from halfbyte.trial.report.limits import limit_rows
from halfbyte.trial.report.material import Material
from halfbyte.trial.report.pairs import Outcome, flips
from halfbyte.trial.report.words import memory, per_cent

__all__ = ["page"]

_STATES = {True: ("holds", "right"), False: ("does not hold", "wrong"), None: ("for the reader", "soft")}


def page(material: Material) -> str:
    """The page as HTML. Texts of models and tasks are escaped, and what would not be seen is spelled out."""
    folder = Path(__file__).parent
    tags = tag_table(material)
    cost, lines = cost_table(material)
    return render(
        folder / "page.html.j2",
        own_style=Markup((folder / "style.css.j2").read_text(encoding="utf-8")),
        name=material.settings.trial.name,
        arms=[arm_name(material.settings.target(arm), arm) for arm in ARMS],
        verdict=verdict(material),
        facts=list(facts(material)),
        limits=[{**vars(row), "words": row.words, "svg": Markup(row.svg)} for row in limit_rows(material.decision)],
        memory={"svg": Markup(_memory_chart(material)), "lines": memory_lines(material)},
        cost=cost,
        cost_lines=lines,
        compared=bool(material.pairs),
        regressions=_cases(material, material.regressions),
        gains=_cases(material, material.gains),
        noise={"svg": Markup(_noise_chart(material)), "note": noise_lines(material)},
        tags=[] if tags is None else [tags],
        panels=[{**vars(panel), "svg": Markup(panel.svg)} for panel in _panels(material) if panel.svg],
        tables=[latency_table(material), *arm_tables(material)],
        integrity=[_check(check) for check in material.integrity],
        dimensions=dimensions(material),
        not_evaluated=NOT_EVALUATED,
        details=[
            task_table(material),
            Table("Settings", [("key", "value"), *flatten(material.settings.to_json())]),
            Table("Environment", [("key", "value"), *flatten(material.environment)]),
        ],
    )


def _cases(material: Material, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    shown, rest = named(outcomes)
    return {"shown": [case(material, outcome) for outcome in shown], "rest": rest}


def _check(check: Finding) -> dict[str, str]:
    state, colour = _STATES[check.ok]
    return {"name": check.name, "detail": check.detail, "fix": check.fix, "state": state, "colour": colour}


def _memory_chart(material: Material) -> str:
    bars = []
    for name, field in (("weights", "weights_bytes"), ("KV pool", "kv_bytes"), ("peak", "peak_bytes")):
        found = [getattr(material.usage[arm], field) if arm in material.usage else None for arm in ARMS]
        bars.append(Bar(name, (found[0], found[1]), (memory(found[0]), memory(found[1]))))
    return bars_chart("Memory: weights, KV pool and peak of both arms", bars)


def _noise_chart(material: Material) -> str:
    seen, noise = flips(material.pairs), material.noise
    rows = []
    for name, found in (("A/A pilot", noise), ("run", seen)):
        if found.pairs:
            values = (found.regressions / found.pairs, found.gains / found.pairs)
            words = (f"{per_cent(values[0])} worse", f"{per_cent(values[1])} better")
            rows.append(Bar(name, values, words))
    return bars_chart("Share of pairs that flip, in the pilot and in the run", rows, ("worse", "better"), (3, 2))


def _panels(material: Material) -> list[Panel]:
    whole = [latencies(material.of(arm)) for arm in ARMS]
    first = [[r.ttft for r in material.of(arm) if r.ttft is not None] for arm in ARMS]
    tokens = [
        [float(r.completion_tokens) for r in material.of(arm) if r.completion_tokens is not None and r.error is None]
        for arm in ARMS
    ]
    note = "Share of requests that took at most so long. Every request is in it but failed ones."
    return [
        Panel("Latency of a request", (), note, distribution_chart("Latency", whole, x_label="seconds")),
        Panel("Time to the first token", (), "", distribution_chart("First token", first, x_label="seconds")),
        Panel(
            "Length of responses",
            (),
            "Share of responses that are at most so long.",
            distribution_chart("Response length", tokens, x_label="tokens"),
        ),
    ]
