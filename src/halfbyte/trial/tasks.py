"""``tasks.jsonl``: representative tasks with expected outcomes, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from halfbyte.config.problems import Origins, explain
from halfbyte.config.sections import Count, NotNegative, Section, Text
from halfbyte.errors import DataError
from halfbyte.trial.canonical import digest
from halfbyte.trial.records import TaskInfo

__all__ = ["ScorerSpec", "Task", "load_tasks", "task_hashes"]

#: Fields that a type of scorer reads beside ``expected``; others are mistakes.
_FIELDS: Mapping[str, frozenset[str]] = {
    "exact": frozenset({"ignore_case"}),
    "contains": frozenset({"ignore_case"}),
    "regex": frozenset({"pattern", "ignore_case"}),
    "numeric": frozenset({"tolerance"}),
    "json_schema": frozenset({"schema"}),
    "math_verify": frozenset(),
    "tool_call": frozenset(),
    "python": frozenset({"function", "threshold"}),
}


class ScorerSpec(Section):
    """How a response is judged.

    Arguments:
        type: ``exact`` (equal but for white space around it), ``contains`` (every expected text stands in it), ``regex``
            (``pattern`` is found), ``numeric`` (last number of the response), ``json_schema`` (the response, or its last fenced
            block, is JSON that fits ``schema``, and equals ``expected`` where that is given), ``math_verify``,
            ``tool_call`` (some call has the expected name and arguments), ``python`` (your ``function``).
        ignore_case: for exact, contains, regex.
        pattern: for regex.
        tolerance: for numeric: relative error allowed.
        schema: for json_schema: a JSON Schema.
        function: for python: ``module:function`` or ``file.py:function`` beside trial.toml; it is called with the task and the
            response as dicts and returns True, False or a number.
        threshold: for python: the number from which a task counts as passed.
    """

    type: Literal["exact", "contains", "regex", "numeric", "json_schema", "math_verify", "tool_call", "python"]
    ignore_case: bool = False
    pattern: Text | None = None
    tolerance: NotNegative = 0.0
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    function: Text | None = None
    threshold: float = 1.0

    @model_validator(mode="after")
    def _fits_together(self) -> ScorerSpec:
        given = {"schema" if name == "schema_" else name for name in self.model_fields_set} - {"type"}
        if foreign := sorted(given - _FIELDS[self.type]):
            raise ValueError(f"{', '.join(foreign)} is nothing that a {self.type} scorer reads")
        for name, value in (("pattern", self.pattern), ("schema", self.schema_), ("function", self.function)):
            if value is None and name in _FIELDS[self.type]:
                raise ValueError(f"a {self.type} scorer needs {name}")
        if self.function is not None and not all(part.strip() for part in self.function.rpartition(":")):
            raise ValueError(f"function takes module:function, got {self.function!r}")
        return self


class Task(Section):
    """One task.

    Arguments:
        id: unique.
        prompt: a user's message; or
        messages: a conversation.
        expected: the expected outcome, as the scorer wants it.
        critical: newly failing it counts against [limits] critical.
        tags: for tables.
        tools: OpenAI tool definitions offered to the model; their calls are counted.
        max_tokens: in place of [sampling] max_tokens.
        note: for readers of the report.
    """

    id: Text
    prompt: Text | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    scorer: ScorerSpec
    expected: Any = None
    critical: bool = False
    tags: tuple[Text, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    max_tokens: Count | None = None
    note: str = ""

    @field_validator("messages")
    @classmethod
    def _conversation(cls, messages: tuple[dict[str, Any], ...] | None) -> tuple[dict[str, Any], ...] | None:
        if messages is not None and (not messages or any(not isinstance(m.get("role"), str) for m in messages)):
            raise ValueError("messages takes objects with a role and a content")
        return messages

    @model_validator(mode="after")
    def _one_prompt(self) -> Task:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a task needs prompt or messages, not both")
        if self.scorer.type in ("exact", "contains", "numeric", "math_verify", "tool_call") and self.expected is None:
            raise ValueError(f"a {self.scorer.type} scorer needs expected")
        return self

    @property
    def info(self) -> TaskInfo:
        """What statistics need of it."""
        return TaskInfo(self.id, self.critical, self.tags, self.tools is not None)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages to send."""
        return [{"role": "user", "content": self.prompt}] if self.messages is None else list(self.messages)

    def to_json(self) -> dict[str, Any]:
        """Every field, JSON types only."""
        return self.model_dump(mode="json", by_alias=True)


def load_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file, in its order.

    Raises:
        DataError: no file, no tasks, a line that is no task (all its wrong keys are named), or an id used twice.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the tasks cannot be read: {error}", where=str(path)) from error
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{path}, line {number}"
        task = _task(line, where)
        if task.id in tasks:
            raise DataError(f"two tasks have the id {task.id!r}", where=where)
        tasks[task.id] = task
    if not tasks:
        raise DataError("there are no tasks", where=str(path), expected="one JSON object a line")
    return tuple(tasks.values())


def task_hashes(tasks: Sequence[Task]) -> dict[str, str]:
    """Task id -> SHA-256 of all its fields."""
    return {task.id: digest(task.to_json()) for task in tasks}


def _task(line: str, where: str) -> Task:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=where) from error
    if not isinstance(data, dict):
        raise DataError("not a JSON object", where=where)
    try:
        return Task.model_validate_json(line, strict=True)
    except ValidationError as error:
        raise DataError(explain(error, Task, Origins(where)).what, where=where) from error
