"""A streamed response put together: server-sent events in, text, tool calls, finish reason and usage out. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from halfbyte.trial.canonical import canonical

__all__ = ["Assembly", "BadResponseError", "EventReader"]

_SHOWN = 120
_LARGEST = 64 << 20  # bytes; no answer to a task is longer, and a server that never stops must not fill the memory


class BadResponseError(Exception):
    """A response that is not what the protocol says; the text is the failure class with its detail."""


class EventReader:
    """Bytes in, the data of each server-sent event out, however the network cut them."""

    def __init__(self) -> None:
        self._rest, self._total = b"", 0

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data lines that ``piece`` completes."""
        self._total += len(piece)
        if self._total > _LARGEST:
            raise BadResponseError(f"bad json: more than {_LARGEST >> 20} MiB")
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "backslashreplace").strip()
            if text.startswith("data:"):
                yield text[5:].strip()


@dataclass
class Assembly:
    """What has come so far.

    Arguments:
        done: the closing ``[DONE]`` came, or the response was whole.
    """

    parts: list[str] = field(default_factory=list)
    calls_by_index: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False

    def event(self, data: str) -> bool:
        """Take one event; whether it brought part of an answer.

        Raises:
            BadResponseError: not JSON, not of the protocol, or an error of the server.
        """
        if data == "[DONE]":
            self.done = True
            return False
        return self.whole(data, "delta")

    def whole(self, data: str, place: str = "message") -> bool:
        """Take one object; ``place`` of the answer in a choice is ``delta`` (streamed) or ``message``."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadResponseError(f"bad json: {data[:_SHOWN]!r}") from error
        if not isinstance(value, dict):
            raise BadResponseError(f"bad json: no object: {data[:_SHOWN]!r}")
        if value.get("error"):
            raise BadResponseError(f"server error: {canonical(value['error'])[:_SHOWN]}")
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        choices = value.get("choices")
        if not isinstance(choices, list):
            raise BadResponseError(f"bad json: no choices: {data[:_SHOWN]!r}")
        came = False
        for choice in choices:
            if not isinstance(choice, dict):
                raise BadResponseError(f"bad json: a choice is no object: {data[:_SHOWN]!r}")
            if choice.get("index", 0) == 0:
                came = self._choice(choice, place, data) or came
        return came

    @property
    def text(self) -> str:
        """The text, with lone surrogates, which UTF-8 cannot write, spelled out."""
        return "".join(self.parts).encode("utf-8", "backslashreplace").decode("utf-8")

    @property
    def calls(self) -> str:
        """The tool calls, canonical JSON; "" for none."""
        listed = [self.calls_by_index[index] for index in sorted(self.calls_by_index)]
        return canonical(listed).encode("utf-8", "backslashreplace").decode("utf-8") if listed else ""

    def tokens(self, *path: str) -> int | None:
        """A count in the usage, or None."""
        value: Any = self.usage
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value if type(value) is int and value >= 0 else None

    def _choice(self, choice: Mapping[str, Any], place: str, data: str) -> bool:
        answer = choice.get(place)
        answer = answer if isinstance(answer, dict) else {"content": choice.get("text")}
        content, calls = answer.get("content"), answer.get("tool_calls") or []
        reason = choice.get("finish_reason")
        wrong = not isinstance(content, str | None) or not isinstance(reason, str | None) or not isinstance(calls, list)
        if wrong or not all(isinstance(call, dict) for call in calls):
            raise BadResponseError(f"bad json: fields of another type: {data[:_SHOWN]!r}")
        if reason is not None:
            self.finish_reason = reason
        if content:
            self.parts.append(content)
        for number, call in enumerate(calls):
            self._call(call, number)
        return bool(content or calls)

    def _call(self, call: Mapping[str, Any], number: int) -> None:
        """A tool call, or the next piece of one: names come whole, arguments in pieces."""
        index = call.get("index", number)
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        whole = self.calls_by_index.setdefault(index if type(index) is int else number, {"name": "", "arguments": ""})
        for key in ("name", "arguments"):
            piece = function.get(key)
            whole[key] += piece if isinstance(piece, str) else canonical(piece) if piece is not None else ""
