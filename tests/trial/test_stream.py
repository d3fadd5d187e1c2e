"""Server-sent events and responses, however they are cut; tool calls in every notation."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.trial.stream import Assembly, BadResponseError, EventReader
from halfbyte.trial.tool_calls import parsed_calls

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}, "required": ["city"]}},
    }
]


def chunk(content: str | None, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}]})


@given(
    parts=st.lists(st.text(max_size=8), max_size=6),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    end=st.sampled_from(["\n\n", "\r\n\r\n", "\n"]),
)
def test_cuts_of_the_network_do_not_matter(parts: list[str], cuts: list[int], end: str) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": len(parts), "prompt_tokens_details": {"cached_tokens": 2}}
    events = [*map(chunk, parts), chunk(None, "stop"), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
    data = "".join(f": a comment{end}event: x{end}data: {event}{end}" for event in events).encode()
    reader, assembly, at, turn = EventReader(), Assembly(), 0, 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        for event in reader.feed(data[at : at + step]):
            assembly.event(event)
        at, turn = at + step, turn + 1
    assert assembly.done
    assert assembly.text == "".join(parts)
    assert assembly.finish_reason == "stop"
    assert assembly.tokens("prompt_tokens") == 3
    assert assembly.tokens("prompt_tokens_details", "cached_tokens") == 2
    assert assembly.tokens("total_tokens") is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_response_or_a_bad_one(data: bytes) -> None:
    reader, assembly = EventReader(), Assembly()
    with contextlib.suppress(BadResponseError):
        for event in reader.feed(b"data: " + data + b"\n"):
            assembly.event(event)


@pytest.mark.parametrize(
    "event",
    [
        "3",
        "[]",
        "{}",
        "null",
        '{"choices": 3}',
        '{"choices": [3]}',
        '{"choices": [{"delta": {"content": 3}}]}',
        "[" * 9999,
    ],
)
def test_objects_of_another_shape_are_bad_json(event: str) -> None:
    with pytest.raises(BadResponseError, match=r"^bad json"):
        Assembly().event(event)


def test_other_choices_are_not_ours() -> None:
    assembly = Assembly()
    assembly.event('{"choices": [{"index": 1, "delta": {"content": "x"}}, {"index": 0, "delta": {"content": "y"}}]}')
    assert assembly.text == "y"


def test_lone_surrogates_can_be_written() -> None:
    assembly = Assembly()
    assembly.event('{"choices": [{"delta": {"content": "a\\ud800"}}]}')
    assert assembly.text.encode() == b"a\\ud800"


def test_a_tool_call_in_pieces() -> None:
    assembly = Assembly()
    pieces = [
        {"index": 0, "id": "x", "function": {"name": "weather", "arguments": '{"ci'}},
        {"index": 1, "function": {"name": "weather", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": 'ty": "Ulm"}'}},
    ]
    for piece in pieces:
        assembly.event(json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]}))
    found = parsed_calls(assembly.text, assembly.calls, TOOLS)
    assert [(call.name, call.arguments) for call in found] == [("weather", {"city": "Ulm"})]  # the other lacks its city


CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", 1),
        (f"Let me look.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", 2),
        (f"[TOOL_CALLS] [{CALL}]", 1),
        ('{"name": "weather", "parameters": {"city": "Ulm"}}', 1),
        (CALL.replace("weather", "whether"), 0),
        (CALL.replace("city", "town"), 0),
        (f"<tool_call>{CALL[:-2]}</tool_call>", 0),
        (f"<tool_call>{CALL}", 0),
        ("I would ask for the weather in Ulm.", 0),
        ('{"name": "weather", "arguments": "Ulm"}', 0),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}', 1),
        ("", 0),
        ("null", 0),
    ],
)
def test_calls_in_the_text(text: str, count: int) -> None:
    assert len(parsed_calls(text, "", TOOLS)) == count
