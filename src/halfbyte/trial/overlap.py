"""Whether tasks were seen in tuning (optimum-intel #1547: calibrated on the evaluation set).

Words are compared: Unicode normalised, case folded, punctuation dropped. A task counts as seen when its words equal a tuning
text's, or 13 words in a row of it (GPT-3's rule for contamination, arXiv:2005.14165, appendix C) stand in one. A shorter
task of at least 8 words counts as seen when all its words stand there in a row.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from halfbyte.errors import DataError
from halfbyte.trial.tasks import Task

__all__ = ["Overlap", "find_overlap", "tuning_texts", "words"]

Gram: TypeAlias = tuple[str, ...]
_WORD = re.compile(r"\w+")
_SHORTEST = 8


@dataclass(frozen=True)
class Overlap:
    """A task that was seen.

    Arguments:
        kind: ``exact`` or ``n-gram``.
        where: file and number of the text in it.
        shown: the words that stand there.
    """

    task: str
    kind: str
    where: str
    shown: str


def words(text: str) -> Gram:
    """The words of a text, in the form that is compared."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def find_overlap(tasks: Sequence[Task], texts: Iterable[tuple[str, str]], ngram: int = 13) -> list[Overlap]:
    """Tasks that were seen, once each, in the order of the tuning texts.

    Arguments:
        texts: (where, text) of the tuning data.
        ngram: words in a row.
    """
    exact: dict[Gram, list[str]] = {}
    grams: dict[int, dict[Gram, list[str]]] = {}
    for task in tasks:
        for said in _user_texts(task):
            exact.setdefault(said, []).append(task.id)
            length = min(ngram, len(said))
            if length >= min(_SHORTEST, ngram):
                table = grams.setdefault(length, {})
                for gram in _windows(said, length):
                    table.setdefault(gram, []).append(task.id)
    found: dict[str, Overlap] = {}
    for where, text in texts:
        seen = words(text)
        for task_id in exact.get(seen, ()):
            found.setdefault(task_id, Overlap(task_id, "exact", where, " ".join(seen)))
        for length, table in grams.items():
            for gram in _windows(seen, length):
                for task_id in table.get(gram, ()):
                    found.setdefault(task_id, Overlap(task_id, "n-gram", where, " ".join(gram)))
    return list(found.values())


def tuning_texts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(where, text): every text of a JSON value, a line each; of a file that is not JSON lines, every line and all of it.

    Raises:
        DataError: a file that cannot be read.
    """
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise DataError(f"the tuning data cannot be read: {error.strerror}", where=str(path)) from error
        lines = content.split("\n")
        values = [_value(line) for line in lines]
        if all(value is not None for line, value in zip(lines, values) if line.strip()):
            for number, value in enumerate(values, 1):
                yield from ((f"{path.name}, line {number}", text) for text in _leaves(value))
        elif (whole := _value(content)) is not None:
            yield from ((path.name, text) for text in _leaves(whole))
        else:
            yield from ((f"{path.name}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
            yield path.name, content


def _user_texts(task: Task) -> Iterator[Gram]:
    """What the user says; a system prompt that all tasks share is no sign of anything."""
    for message in task.conversation():
        content = message.get("content")
        if message.get("role") == "user":
            for text in _leaves(content):
                if said := words(text):
                    yield said


def _windows(said: Gram, length: int) -> Iterator[Gram]:
    for start in range(len(said) - length + 1):
        yield said[start : start + length]


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)


def _value(line: str) -> Any:
    """The object or array of a line; None where it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None
