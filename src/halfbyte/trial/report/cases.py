"""Tasks to look at: what was asked, what was expected, and what both arms answered, beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.html.table import Table
from halfbyte.trial.pairs import Pair
from halfbyte.trial.records import ARMS, Record
from halfbyte.trial.report.material import Material
from halfbyte.trial.report.pairs import Outcome, said
from halfbyte.trial.report.words import seconds
from halfbyte.trial.tasks import Task

__all__ = ["CASES_SHOWN", "Case", "case", "named", "task_table"]

#: Tasks shown with their texts; the others are named.
CASES_SHOWN = 40


@dataclass(frozen=True)
class Case:
    """A task with both outputs beside each other.

    Arguments:
        scores: what each arm passed, in words.
        remarks: critical, noise, failures.
        same: how many characters both texts begin with alike.
        notes: of reviewers, with their names.
    """

    task: str
    remarks: tuple[str, ...]
    prompt: str
    expected: str
    scores: tuple[str, str]
    texts: tuple[str, str]
    ends: tuple[str, str]
    same: int
    notes: tuple[str, ...]


def case(material: Material, outcome: Outcome) -> Case:
    """A task's outputs beside each other: of the repeat in which the outcome changed."""
    pair, task = outcome.shown, material.task.get(outcome.task)
    before, after = outcome.passes
    n = len(outcome.pairs)
    remarks = []
    if material.critical(outcome.task):
        remarks.append("critical")
    if n > 1:
        remarks.append(f"repeat {pair.baseline.repeat + 1} of {n} shown")
    if outcome.noise_pairs:
        flipping = f"flips in {outcome.noise} of {outcome.noise_pairs} A/A pairs"
        remarks.append(flipping if outcome.noise else "does not flip in the A/A pilot")
    return Case(
        task=outcome.task,
        remarks=tuple(remarks),
        prompt="(not in the task file)" if task is None else _prompt(task),
        expected="" if task is None else _expected(task),
        scores=(f"passed {before} of {n}", f"passed {after} of {n}"),
        texts=(said(pair.baseline), said(pair.candidate)),
        ends=(_end(pair.baseline), _end(pair.candidate)),
        same=_common(pair),
        notes=tuple(f"{note.by}: {note.text}" for note in material.notes if note.task == outcome.task),
    )


def task_table(material: Material) -> Table:
    """Every task with what both arms passed."""
    rows = [["task", "tags", *ARMS, "A/A flips"]]
    for outcome in material.outcomes:
        task = material.task.get(outcome.task)
        n = len(outcome.pairs)
        noise = f"{outcome.noise} of {outcome.noise_pairs}" if outcome.noise_pairs else ""
        tags = "" if task is None else ", ".join(task.tags)
        rows.append([outcome.task, tags, *(f"{passed} of {n}" for passed in outcome.passes), noise])
    return Table("All tasks", rows)


def named(outcomes: Sequence[Outcome]) -> tuple[Sequence[Outcome], list[str]]:
    """Those to be shown, and the names of the rest."""
    return outcomes[:CASES_SHOWN], [outcome.task for outcome in outcomes[CASES_SHOWN:]]


def _end(record: Record) -> str:
    if record.error is not None:
        return f"failed: {record.error}"
    tokens = "" if record.completion_tokens is None else f", {record.completion_tokens} tokens"
    return f"ended by {record.finish_reason or 'no given reason'}{tokens}, {seconds(record.latency)}"


def _prompt(task: Task) -> str:
    if task.prompt is not None:
        return task.prompt
    lines = []
    for message in task.messages or ():
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        lines.append(f"[{message.get('role')}] {text}")
    return "\n".join(lines)


def _expected(task: Task) -> str:
    spec = task.scorer
    expected = task.expected
    words = (
        "" if expected is None else expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False)
    )
    how = {"regex": spec.pattern, "json_schema": json.dumps(spec.schema_, ensure_ascii=False), "python": spec.function}
    detail = how.get(spec.type)
    scorer = f"{spec.type}{f' {detail}' if detail else ''}"
    return f"{words}\n({scorer})" if words else f"({scorer})"


def _common(pair: Pair) -> int:
    a, b = said(pair.baseline), said(pair.candidate)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
