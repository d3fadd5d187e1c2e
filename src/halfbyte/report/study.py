"""The page of a study: estimates with intervals, accuracy against cost, curves by arm; one offline HTML file.

It is a function of the content of ``study.json`` alone, so the page of committed results can be made again anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from halfbyte.html.page import render
from halfbyte.html.panel import Panel
from halfbyte.html.text import flatten, visible
from halfbyte.report.estimates import Interval, Small, Spot, forest_chart, scatter_chart, small_multiples
from halfbyte.report.study_tables import status_line, study_tables

__all__ = ["render_study"]

#: metric, title, note, logarithmic
CURVES = (
    ("gap/k3_kl", "KL of rollout and learner", "k3 estimate, nats.", True),
    ("entropy/mean", "Entropy", "Of the learner's next-token distribution, nats.", False),
    ("optim/grad_norm", "Gradient norm", "Before clipping.", True),
    ("refit/changed", "BF16 weights changed by an update", "Share.", True),
    ("refit/changed_codes", "FP4 codes changed by an update", "Share; arms that run in FP4.", True),
    ("refit/changed_scales", "FP4 block scales changed by an update", "Share; arms that run in FP4.", True),
)


def render_study(data: Mapping[str, Any], name: str) -> str:
    """The page of results as HTML that loads nothing.

    Arguments:
        data: the content of ``study.json``.
        name: for the title.
    """
    tables = dict(study_tables(data))
    groups = [
        {
            "name": group["name"],
            "panels": [(panel, Markup(panel.svg)) for panel in _panels(group, data["reference"]) if panel.svg],
            "tables": tables[group["name"]],
        }
        for group in data["groups"]
    ]
    history = data.get("history", [])
    broken = [run for run in data["runs"] if run["status"] == "broken"]
    return render(
        Path(__file__).with_name("study.html.j2"),
        name=visible(name),
        status=status_line(data),
        groups=groups,
        rules=sorted(data["rules"].items()),
        seeds=sorted({len(row["seeds"]) for group in data["groups"] for row in group["arms"]}),
        changes=[entry["finished_runs"] for entry in history[1:]],
        broken=[(run["arm"], run["seed"], run["steps"], run["note"]) for run in broken],
        plan=[(visible(key), visible(value)) for key, value in flatten(data.get("plan", {}))],
    )


def _panels(group: Mapping[str, Any], reference: str) -> list[Panel]:
    rows = group["arms"]
    precisions = sorted({p for row in rows for p in row["deployed"]})
    legend = ((0, "bootstrap; thin: Student's t"),)
    panels = [
        Panel("Final accuracy", legend, "Held out, sampled, in the arm's own rollout.", _forest(rows, ("final",), None))
    ]
    panels += [
        Panel(f"Accuracy served in {p}", legend, "Every policy in one precision.", _forest(rows, ("deployed", p), None))
        for p in precisions
    ]
    keys = [("final", "final accuracy"), ("area", "area under the curve")]
    keys += [(f"deployed/{p}", f"served in {p}") for p in precisions]
    panels += [
        Panel(
            f"Difference to {reference}: {words}",
            legend,
            "Paired by seed; right of the line is better.",
            _forest(rows, ("differences", key), 0.0),
        )
        for key, words in keys
    ]
    panels.append(
        Panel(
            "Accuracy against rollout cost",
            ((1, "no arm is both better and cheaper"), (0, "others")),
            "Seconds of all rollouts of a run, on the machine and beside the load of this study.",
            _pareto(rows, group["pareto"]),
        )
    )
    words = ((0, "mean, least and most over seeds"), (1, reference))
    panels.append(
        Panel(
            "Accuracy over training",
            words,
            "Held out, in the arm's own rollout.",
            _curves(rows, None, reference, False),
        )
    )
    panels += [Panel(title, words, note, _curves(rows, key, reference, log)) for key, title, note, log in CURVES]
    return panels


def _forest(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], line: float | None) -> str:
    intervals = []
    for row in rows:
        found: Any = row
        for key in keys:
            found = found.get(key) if found else None
        if found:
            wide = _pair(found, "t_low")
            if wide is not None:  # of two or three seeds it may pass what an accuracy can be
                wide = (max(wide[0], -1.0 if line is not None else 0.0), min(wide[1], 1.0))
            intervals.append(Interval(row["arm"], found["mean"], _pair(found, "low"), wide))
    x_label = "accuracy" if line is None else "difference in accuracy"
    return forest_chart(f"{' '.join(keys)} by arm", intervals, x_label=x_label, line=line)


def _pareto(rows: Sequence[Mapping[str, Any]], front: Sequence[str]) -> str:
    spots = []
    for row in rows:
        cost, accuracy = row["seconds"].get("time/rollout"), row["final"]
        if row["trained"] and cost and accuracy:
            colour = 1 if row["arm"] in front else 0
            spots.append(
                Spot(row["arm"], cost["mean"], accuracy["mean"], _pair(cost, "low"), _pair(accuracy, "low"), colour)
            )
    return scatter_chart(
        "Final accuracy against rollout seconds",
        spots,
        x_label="rollout seconds a run",
        y_label="final accuracy",
        front=front,
    )


def _curves(rows: Sequence[Mapping[str, Any]], key: str | None, reference: str, logarithmic: bool) -> str:
    found = [
        Small(
            row["arm"],
            [(p[0], p[1], p[2], p[3]) for p in (row["curve"] if key is None else row["series"].get(key, ()))],
        )
        for row in rows
    ]
    base = next((curve for curve in found if curve.name == reference and curve.points), None)
    return small_multiples(f"{key or 'accuracy'} over training by arm", found, reference=base, logarithmic=logarithmic)


def _pair(found: Mapping[str, Any], low: str) -> tuple[float, float] | None:
    a, b = found[low], found[low.replace("low", "high")]
    return None if a is None or b is None else (float(a), float(b))
