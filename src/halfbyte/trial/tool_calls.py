"""Tool calls in a response, whether the server parsed them or the model's own notation is still in the text.

dgx-spark #89: NVFP4 weights broke tool calls, and the only sign was finish_reason "stop". So the calls of every task that
offers tools are counted, in both arms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "parsed_calls"]

#: Hermes, Qwen and SmolLM write calls so.
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"


@dataclass(frozen=True)
class Call:
    """A call of a tool that was offered, with arguments that are a JSON object."""

    name: str
    arguments: Mapping[str, Any]


def parsed_calls(text: str, calls: str, tools: Sequence[Mapping[str, Any]]) -> tuple[Call, ...]:
    """The calls that an assistant could carry out.

    Arguments:
        text: of the response.
        calls: the server's tool calls, a JSON array of {name, arguments (text)}; "" for none.
        tools: OpenAI tool definitions. A call of another name, without its required arguments, or with arguments that are no
            JSON object, does not count.
    """
    required = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        required[function.get("name")] = schema.get("required", ()) if isinstance(schema, Mapping) else ()
    found = []
    for name, arguments in _candidates(text, calls):
        arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
        known = isinstance(name, str) and name in required
        if known and isinstance(arguments, dict) and all(key in arguments for key in required[name]):
            found.append(Call(str(name), arguments))
    return tuple(found)


def _candidates(text: str, calls: str) -> Iterator[tuple[Any, Any]]:
    listed = _loaded(calls) if calls else None
    if isinstance(listed, list) and listed:
        for call in listed:
            if isinstance(call, dict):
                yield call.get("name"), call.get("arguments")
        return
    for value in _values(text.strip()):
        for call in value if isinstance(value, list) else [value]:
            if isinstance(call, dict):
                yield call.get("name"), call.get("arguments", call.get("parameters"))


def _values(text: str) -> Iterator[Any]:
    """JSON values where some family writes its calls: in tags, behind [TOOL_CALLS], or as the whole text."""
    tagged = _TAGGED.findall(text)
    if tagged:
        yield from map(_loaded, tagged)
    elif _MISTRAL in text:
        yield _loaded(text.partition(_MISTRAL)[2])
    elif text[:1] in "{[" and text:
        yield _loaded(text)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
