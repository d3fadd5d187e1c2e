"""Bodies of every kind: an answer or a refusal in OpenAI's format, never a 500, and nothing left behind."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_case import PATIENCE, metric, wait_until

from halfbyte.serve.parameters import HARMLESS, NEUTRAL, ChatBody, CompletionBody, SamplingBody, parse, read_object
from halfbyte.serve.problem import Problem
from halfbyte.serve.server import Server

PATHS = ("/v1/completions", "/v1/chat/completions")


def post(server: Server, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    try:
        connection.request("POST", path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def refused(status: int, answer: bytes) -> dict[str, Any]:
    """The error object of a refusal."""
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 400 <= status < 500
    assert error["message"]
    return error


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=8,
)
names = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *NEUTRAL, *HARMLESS})
good = {"model": "tiny", "max_tokens": 3}


@given(
    chat=st.booleans(),
    changes=st.dictionaries(st.sampled_from(names) | st.text(max_size=6), json_values, max_size=3),
    dropped=st.sets(st.sampled_from(["model", "prompt", "messages"]), max_size=1),
)
@settings(max_examples=150, deadline=None)
def test_any_json_is_answered_or_refused(
    server: Server, chat: bool, changes: dict[str, Any], dropped: set[str]
) -> None:
    base = {**good, **({"messages": [{"role": "user", "content": "1"}]} if chat else {"prompt": "1"})}
    body = {k: v for k, v in {**base, **changes}.items() if k not in dropped}
    status, answer = post(server, PATHS[chat], json.dumps(body).encode())
    assert (status == 200 and b"server_error" not in answer) or refused(status, answer)


@given(body=st.binary(max_size=60) | st.text(max_size=30).map(lambda t: t.encode("utf-8", "surrogatepass")))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_refused(server: Server, body: bytes) -> None:
    for path in PATHS:
        status, answer = post(server, path, body)
        refused(status, answer)


@given(
    message=st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id", "x"]), json_values, max_size=4
    )
)
@settings(max_examples=100, deadline=None)
def test_any_message_is_answered_or_refused(server: Server, message: dict[str, Any]) -> None:
    body = {**good, "messages": [{"role": "user", "content": "1", **message}]}
    status, answer = post(server, PATHS[1], json.dumps(body).encode())
    assert (status == 200 and b"server_error" not in answer) or refused(status, answer)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not JSON"),
        (b"[1]", "not an object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"model": "tiny", "prompt": "1", "temperature": NaN}', "NaN"),
        (b'{"model": "tiny", "prompt": "1", "temperature": 1e999}', "temperature"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "tiny", "prompt": "1", "stop": ["\\udfff"]}', "surrogate"),
        (b'{"model": "\xff"}', "not JSON"),
        (b'{"model": "tiny", "prompt": "1", "seed": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"model": "tiny", "prompt": "1", "seed": 123456789012345678901234567890}', "seed"),
        (b'{"model": "tiny", "prompt": ""}', "no token"),
        (b'{"model": "tiny", "prompt": []}', "empty list"),
        (b'{"model": "tiny", "prompt": [[]]}', "no token"),
        (b'{"model": "tiny", "prompt": [99]}', "outside the vocabulary"),
        (b'{"model": "tiny", "prompt": [-1]}', "prompt"),
        (b'{"model": "tiny", "prompt": [true]}', "prompt"),
        (b'{"model": "tiny", "prompt": ["1", 2]}', "prompt"),
        (b'{"model": "tiny", "prompt": "1", "max_tokens": 0}', "max_tokens"),
        (b'{"model": "tiny", "prompt": "1", "max_tokens": 256}', "more than 256"),
        (b'{"model": "tiny", "prompt": "1", "n": true}', "n"),
        (b'{"model": "tiny", "prompt": "1", "n": 1000}', "at most 128"),
        (b'{"model": "tiny", "prompt": "1", "stop": [""]}', "stop"),
        (b'{"model": "tiny", "prompt": "1", "temperature": -1}', "temperature"),
        (b'{"model": "tiny", "prompt": "1", "temperature": 1e-9}', "temperature"),
        (b'{"model": "tiny", "prompt": "1", "top_p": 0}', "top_p"),
        (b'{"model": "tiny", "prompt": "1", "logprobs": 21}', "logprobs"),
        (b'{"model": "tiny", "prompt": "1", "echo": true, "logprobs": 1}', "echo"),
        (b'{"model": "tiny", "prompt": "1", "best_of": 3}', "best_of"),
        (b'{"model": "tiny", "prompt": "1", "suffix": "x"}', "suffix"),
        (b'{"model": "tiny", "prompt": "1", "stream_options": {"include_usage": true}}', "stream_options"),
        (b'{"model": "tiny", "prompt": "1", "frequency_penalty": 0.5}', "frequency_penalty"),
        (b'{"model": "tiny", "prompt": "1", "logit_bias": {"1": 5}}', "logit_bias"),
        (b'{"model": "tiny", "prompt": "1", "temprature": 1}', "Unknown parameter: 'temprature'"),
        (b'{"prompt": "1"}', "Missing parameter: 'model'"),
    ],
)
def test_what_is_wrong_is_named(server: Server, body: bytes, word: str) -> None:
    status, answer = post(server, PATHS[0], body)
    assert status == 400
    assert word in refused(status, answer)["message"]


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages"),
        ({"messages": [{"content": "1"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"top_logprobs": 2}, "needs 'logprobs'"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "cannot be set"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named(server: Server, extra: dict[str, Any], word: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "1"}], **extra}
    status, answer = post(server, PATHS[1], json.dumps(body).encode())
    assert status == 400
    assert word in refused(status, answer)["message"]


def test_values_that_change_nothing_are_taken() -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values} | {"audio": None}
    harmless = {name: {"any": "thing"} for name in HARMLESS}
    body = parse(ChatBody, {"model": "m", "messages": [{}], "n": 1, **neutral, **harmless})
    assert body.tool_choice == "auto"
    assert parse(CompletionBody, {"model": "m", "prompt": "x", "best_of": None, "stop": None}).stop is None


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_values_that_change_something_are_refused_by_name(name: str) -> None:
    kind: type[SamplingBody] = ChatBody
    with pytest.raises(Problem) as caught:
        parse(kind, {"model": "m", "messages": [{}], name: "surely not neutral"})
    assert caught.value.param == name


def test_true_is_not_one() -> None:
    with pytest.raises(Problem, match="presence_penalty"):
        parse(ChatBody, {"model": "m", "messages": [{}], "presence_penalty": False})
    with pytest.raises(Problem, match="parallel_tool_calls"):
        parse(ChatBody, {"model": "m", "messages": [{}], "parallel_tool_calls": 1})


def test_arguments_of_tool_calls_reach_the_template_as_objects(server: Server) -> None:
    from halfbyte.serve.prompts import _plain

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    out = _plain({"role": "assistant", "content": None, "tool_calls": [call]}, "messages.0")
    assert out["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _plain({"role": "user", "content": parts}, "messages.0")["content"] == "a\nb"


def test_nothing_is_left_behind(server: Server) -> None:
    """After all of the above."""
    wait_until(lambda: metric(server, "halfbyte_active_requests") == 0, "the requests to end")
    wait_until(lambda: metric(server, "halfbyte_kv_pages_used") == 0, "their pages to be freed")
    assert metric(server, "halfbyte_queue_length") == metric(server, "halfbyte_running_samples") == 0
    assert metric(server, "halfbyte_engine_faults_total") == 0


def test_deep_json_is_refused_not_recursed_into() -> None:
    with pytest.raises(Problem, match="JSON"):
        read_object(b'{"a":' * 50_000)
