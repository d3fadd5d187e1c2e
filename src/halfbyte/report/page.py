"""The page: facts, charts, samples, configuration, in one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from halfbyte.html.page import render as render_template
from halfbyte.html.page import write
from halfbyte.html.scale import number
from halfbyte.html.text import flatten, visible
from halfbyte.report.panels import panels
from halfbyte.report.records import Record, Sample, read_record, read_samples

__all__ = ["build", "render"]

SAMPLES_SHOWN = 4


def build(run_folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run, finished or not.

    Arguments:
        run_folder: a folder that ``halfbyte train`` writes or has written.
        out: the file; ``report.html`` in the run folder by default.

    Returns:
        The file written.

    Raises:
        DataError: the folder is not a run, or the file cannot be written.
    """
    folder = Path(run_folder)
    path = Path(out) if out is not None else folder / "report.html"
    text = render(read_record(folder))
    write(path, text)
    return path


def render(record: Record) -> str:
    """The page of a record."""
    shown = panels(record)
    return render_template(
        Path(__file__).with_name("page.html.j2"),
        name=visible(record.folder.resolve().name),
        status=_status(record),
        facts=list(_facts(record)),
        panels=[(panel, Markup(panel.svg)) for panel in shown if panel.svg],
        absent=[panel.title for panel in shown if not panel.svg],
        groups=_sample_groups(record),
        last_values=sorted(
            (key, number(value, 6)) for key, value in (record.train[-1][1].items() if record.train else ())
        ),
        evaluations=[(step, sorted(row.items())) for step, row in record.evaluations],
        tables=[
            (title, [(visible(key), visible(value)) for key, value in flatten(value)])
            for title, value in (
                ("Summary", record.summary),
                ("Configuration", record.config),
                ("Environment", record.environment),
            )
            if value
        ],
    )


def _status(record: Record) -> str:
    step, total = record.last_step, _dig(record.config, "train", "steps")
    if record.finished:
        text = f"finished after {step} steps"
    else:
        of = f" of {total}" if isinstance(total, int) else ""
        text = f"unfinished: {step}{of} steps so far (still running, or stopped)"
    if record.broken_lines:
        text += (
            f"; {record.broken_lines} unreadable line{'s' if record.broken_lines > 1 else ''} of metrics.jsonl skipped"
        )
    return text


def _facts(record: Record) -> Iterator[tuple[str, str, str]]:
    """(name, value, remark) for the head of the page, from the summary or from what the metrics already tell."""
    summary = record.summary
    evaluations = [row for _, row in record.evaluations if "eval/accuracy" in row]
    before, after = _number(summary.get("accuracy_before")), _number(summary.get("accuracy_after"))
    if before is None and evaluations and record.evaluations[0][0] == 0:
        before = evaluations[0]["eval/accuracy"]
    if after is None and len(evaluations) > 1:
        after = evaluations[-1]["eval/accuracy"]
    if before is not None:
        yield "accuracy before", f"{before:.3f}", _interval(evaluations[0]) if evaluations else ""
    if after is not None:
        label = "accuracy after" if record.finished else "accuracy so far"
        yield label, f"{after:.3f}", _interval(evaluations[-1]) if evaluations else ""
    if before is not None and after is not None:
        yield "gain", f"{100 * (after - before):+.1f}", "points, held out, sampled"
    rollout, learner = _number(summary.get("rollout_seconds")), _number(summary.get("learner_seconds"))
    wall = _number(summary.get("wall_seconds"))
    if wall is not None:
        parts = [f"{name} {number(s)} s" for name, s in (("rollout", rollout), ("learner", learner)) if s is not None]
        yield "wall time", f"{number(wall)} s", ", ".join(parts)
    for key, metric, label in (
        ("k3_kl", "gap/k3_kl", "k3 KL, rollout to learner"),
        ("mean_abs_gap", "gap/mean_abs", "mean |gap|"),
    ):
        value, remark = _number(summary.get(key)), "nats per token"
        if value is None and (points := record.series(metric)):
            value, remark = points[-1][1], "nats per token, last step"
        if value is not None:
            yield label, number(value), remark
    precision = summary.get("precision", record.config.get("precision"))
    if isinstance(precision, str):
        yield "rollout precision", visible(precision), f"seed {_dig(record.config, 'train', 'seed')}"


def _interval(row: Mapping[str, float]) -> str:
    if "eval/accuracy_low" not in row or "eval/accuracy_high" not in row:
        return ""
    text = f"95%: {row['eval/accuracy_low']:.3f} to {row['eval/accuracy_high']:.3f}"
    return f"{text}, n = {row['eval/n']:.0f}" if "eval/n" in row else text


def _sample_groups(record: Record) -> list[tuple[str, list[Sample]]]:
    """Trajectories of the first and of the last step that has a file."""
    steps = list(record.sample_files)
    groups = []
    for title, step in (("first", steps[:1]), ("last", steps[1:][-1:])):
        if step and (samples := read_samples(record.sample_files[step[0]], SAMPLES_SHOWN)):
            groups.append((f"{title} saved step ({step[0]})", samples))
    return groups


def _dig(value: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        item = value.get(key) if isinstance(value, Mapping) else None
        if item is None:
            return None
        value = item
    return value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
