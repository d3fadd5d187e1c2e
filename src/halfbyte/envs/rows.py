"""Rows of a JSON Lines file as prompts, with the file and line of everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.envs.environment import Prompt
from halfbyte.errors import DataError

__all__ = ["Row", "read_rows"]

_SHOWN = 5


@dataclass(frozen=True)
class Row:
    """A prompt and where it stands, as ``file:line``."""

    prompt: Prompt
    where: str


class _Wrong(Exception):
    """What is wrong with one line."""


def read_rows(
    path: Path,
    *,
    prompt_field: str,
    answer_field: str,
    answer_problem: Callable[[Any], str | None],
    id_prefix: str = "",
) -> list[Row]:
    """All rows of a file. Blank lines are skipped; fields other than prompt, answer and ``id`` become metadata.

    Arguments:
        prompt_field: text, or a list of chat messages.
        answer_field: see ``answer_problem``; may be missing if that accepts None.
        answer_problem: why an answer cannot be used, or None.
        id_prefix: goes before the ids of rows without an ``id``: file name and line.

    Raises:
        DataError: the file is missing or empty, or lines are wrong; the first few are listed with file and line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the data file cannot be read: {error.strerror}", where=str(path), expected="a JSON Lines file"
        ) from error
    rows: list[Row] = []
    wrong: list[str] = []
    ids: dict[str, str] = {}
    # Split at line feeds alone: str.splitlines would also cut at U+2028, which JSON allows inside text.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            default_id = f"{id_prefix}{path.name}:{number}"
            row = Row(_prompt(line, default_id, prompt_field, answer_field, answer_problem), where)
            if row.prompt.id in ids:
                raise _Wrong(f"id {row.prompt.id!r} is taken by {ids[row.prompt.id]}")
        except _Wrong as error:
            wrong.append(f"{where}: {error}")
            continue
        ids[row.prompt.id] = where
        rows.append(row)
    if wrong:
        more = f"\n    and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise DataError(
            f"{len(wrong)} of {len(wrong) + len(rows)} lines cannot be used",
            where="\n    ".join(["", *wrong[:_SHOWN]]) + more,
            expected=f'one JSON object a line, such as {{"{prompt_field}": "2+3=", "{answer_field}": "5"}}',
            fix="mend or remove the lines",
        )
    if not rows:
        raise DataError(
            "the data set is empty", where=str(path), expected="at least one line", fix="is this the right file?"
        )
    return rows


def _prompt(
    line: bytes, default_id: str, prompt_field: str, answer_field: str, problem: Callable[[Any], str | None]
) -> Prompt:
    fields = _object(line)
    if prompt_field not in fields:
        raise _Wrong(f"there is no field {prompt_field!r}; found: {', '.join(fields) or 'none'}")
    content = fields.pop(prompt_field)
    answer = fields.pop(answer_field, None)
    given_id = fields.pop("id", default_id)
    if type(given_id) not in (str, int) or given_id == "":
        raise _Wrong(f"id is {given_id!r}, expected text or an integer")
    if answer is None and (reason := problem(None)) is not None:
        raise _Wrong(f"there is no answer in field {answer_field!r}; found: {', '.join(fields) or 'none'}")
    if answer is not None and (reason := problem(answer)) is not None:
        raise _Wrong(reason)
    if isinstance(content, str):
        if not content.strip():
            raise _Wrong(f"{prompt_field} is empty")
        return Prompt(str(given_id), text=content, answer=answer, metadata=fields)
    return Prompt(str(given_id), messages=_messages(content, prompt_field), answer=answer, metadata=fields)


def _object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant)
        # An escaped half of a surrogate pair is valid JSON, but no text that a tokenizer takes.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _Wrong(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _Wrong("half of a surrogate pair") from error
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _Wrong(f"a JSON {type(value).__name__}, expected an object")
    return value


def _messages(content: Any, field: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(content, list) or not content:
        raise _Wrong(f"{field} is {type(content).__name__}, expected text or a list of messages")
    for i, message in enumerate(content):
        if not isinstance(message, dict):
            raise _Wrong(f"{field}[{i}] is {type(message).__name__}, expected an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise _Wrong(f"{field}[{i}] has no text in {key!r}")
    if content[-1]["role"] == "assistant":
        raise _Wrong(f"{field} ends with the assistant's turn, nothing is left to answer")
    return tuple(content)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
