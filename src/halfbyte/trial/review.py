"""Regressions for a human to read, and the notes on them. A note never changes the verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.errors import DataError
from halfbyte.trial.canonical import canonical
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.records import Record, Strict

__all__ = ["Note", "Regression", "add_note", "read_notes", "regressions"]


@dataclass(frozen=True)
class Note(Strict):
    """What somebody wrote about a task."""

    task: str
    by: str
    text: str
    when: float


@dataclass(frozen=True)
class Regression:
    """A task and repeat that the baseline passed and the candidate did not."""

    task: str
    critical: bool
    baseline: Record
    candidate: Record


def regressions(folder: TrialFolder, records: Sequence[Record]) -> list[Regression]:
    """Critical tasks first, then in the tasks' order."""
    order = {task.id: number for number, task in enumerate(folder.tasks)}
    critical = {task.id for task in folder.tasks if task.critical}
    before = {(r.task, r.repeat): r for r in records if r.arm == "baseline" and r.passed}
    found = [
        Regression(r.task, r.task in critical, before[r.task, r.repeat], r)
        for r in records
        if r.arm == "candidate" and not r.passed and (r.task, r.repeat) in before
    ]
    return sorted(found, key=lambda f: (not f.critical, order[f.task], f.candidate.repeat))


def read_notes(folder: TrialFolder) -> list[Note]:
    """Notes, oldest first.

    Raises:
        DataError: a line that is no note.
    """
    if not folder.reviews.exists():
        return []
    found = []
    for number, line in enumerate(folder.reviews.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            where = f"{folder.reviews}, line {number}"
            try:
                data = json.loads(line)
            except ValueError as error:
                raise DataError(f"not JSON: {error}", where=where) from error
            found.append(Note.from_json(data, where))
    return found


def add_note(folder: TrialFolder, task: str, text: str, by: str) -> Note:
    """Keep a note.

    Raises:
        DataError: no such task, or no text.
    """
    if task not in {known.id for known in folder.tasks}:
        raise DataError(f"there is no task {task!r}", where="--task")
    if not text.strip():
        raise DataError("the note is empty", where="--note")
    note = Note(task, by, text.strip(), time.time())
    with folder.reviews.open("a", encoding="utf-8") as file:
        file.write(canonical(note.to_json()) + "\n")
    return note
