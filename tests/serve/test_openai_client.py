"""The real ``openai`` client against the server; every answer is what the engine says offline."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from serve_case import Offline, async_client, client

from halfbyte.serve.server import Server

CHAT = [{"role": "user", "content": "12+3"}]
CHAT_PROMPT = "12+3\n="


def test_a_completion_is_the_engines_own(server: Server, offline: Offline) -> None:
    answer = client(server).completions.create(model="tiny", prompt="7*8=", max_tokens=12, seed=5)
    (expected,) = offline("7*8=", max_tokens=12, seed=5)
    choice = answer.choices[0]
    assert choice.text == offline.tokenizer.decode(expected.response_ids.tolist())
    assert choice.finish_reason == {"eos": "stop"}.get(expected.finish_reason, expected.finish_reason)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == len(expected.response_ids)
    assert answer.object == "text_completion"
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.endswith("-v0")


def test_a_chat_goes_through_the_models_template(server: Server, offline: Offline) -> None:
    answer = client(server).chat.completions.create(model="tiny", messages=CHAT, max_tokens=9, seed=1, n=3)
    expected = offline(CHAT_PROMPT, max_tokens=9, seed=1, n=3)
    assert [c.message.content for c in answer.choices] == [
        offline.tokenizer.decode(t.response_ids.tolist()) for t in expected
    ]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert {c.message.role for c in answer.choices} == {"assistant"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(t.response_ids) for t in expected)


def test_a_streamed_chat_joins_to_the_whole_one(server: Server, offline: Offline) -> None:
    stream = client(server).chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_completion_tokens=9,
        seed=1,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, finishes, roles, usage = {}, {}, {}, None
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            roles.setdefault(choice.index, choice.delta.role)
            if choice.finish_reason:
                assert choice.index not in finishes, "a choice ends once"
                finishes[choice.index] = choice.finish_reason
    expected = offline(CHAT_PROMPT, max_tokens=9, seed=1, n=3)
    assert texts == {i: offline.tokenizer.decode(t.response_ids.tolist()) for i, t in enumerate(expected)}
    assert finishes == {i: {"eos": "stop"}.get(t.finish_reason, t.finish_reason) for i, t in enumerate(expected)}
    assert set(roles.values()) == {"assistant"}
    assert usage is not None
    assert usage.completion_tokens == sum(len(t.response_ids) for t in expected)


def test_tools_reach_the_template_and_text_comes_back_as_it_is(server: Server, offline: Offline) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    options: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 6, "seed": 2, "tools": [tool]}
    answer = client(server).chat.completions.create(**options)
    assert answer.choices[0].message.content == offline.text("(add)12+3\n=", max_tokens=6, seed=2)
    assert answer.choices[0].message.tool_calls is None
    without = client(server).chat.completions.create(**options, tool_choice="none")
    assert without.choices[0].message.content == offline.text(CHAT_PROMPT, max_tokens=6, seed=2)


def test_several_prompts_in_text_and_in_ids(server: Server, offline: Offline) -> None:
    prompts = ["1+1=", "9-4=", "1+1="]
    answer = client(server).completions.create(model="tiny", prompt=prompts, max_tokens=6, seed=3, n=2)
    twice = offline("1+1=", max_tokens=6, seed=3, n=4)
    expected = [*twice[:2], *offline("9-4=", max_tokens=6, seed=3, n=2), *twice[2:]]
    texts = [offline.tokenizer.decode(t.response_ids.tolist()) for t in expected]
    assert [c.text for c in answer.choices] == texts, "a prompt that comes twice has four different samples"
    ids = [offline.tokenizer.encode(p) for p in prompts]
    again = client(server).completions.create(model="tiny", prompt=ids, max_tokens=6, seed=3, n=2)
    assert [c.text for c in again.choices] == texts
    single = client(server).completions.create(model="tiny", prompt=ids[1], max_tokens=6, seed=3)
    assert single.choices[0].text == texts[2]


def test_echo_repeats_the_prompt(server: Server, offline: Offline) -> None:
    answer = client(server).completions.create(model="tiny", prompt="3+4=", max_tokens=5, seed=8, echo=True)
    assert answer.choices[0].text == "3+4=" + offline.text("3+4=", max_tokens=5, seed=8)
    stream = client(server).completions.create(
        model="tiny", prompt="3+4=", max_tokens=5, seed=8, echo=True, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == answer.choices[0].text


def test_sampling_parameters_reach_the_engine(server: Server, offline: Offline) -> None:
    cases: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 2.5},
        {"top_p": 0.6},
        {"temperature": 1.5, "top_p": 0.9},
    ]
    for case in cases:
        answer = client(server).completions.create(model="tiny", prompt="8-5=", max_tokens=10, seed=4, **case)
        assert answer.choices[0].text == offline.text("8-5=", max_tokens=10, seed=4, **case), case
    extra = {"top_k": 3, "min_p": 0.05, "ignore_eos": True}
    answer = client(server).completions.create(
        model="tiny", prompt="8-5=", max_tokens=10, seed=4, temperature=3, extra_body=extra
    )
    assert answer.choices[0].text == offline.text("8-5=", max_tokens=10, seed=4, temperature=3.0, **extra)
    stopped = client(server).completions.create(
        model="tiny", prompt="8-5=", max_tokens=40, seed=4, extra_body={"stop_token_ids": [2], "return_token_ids": True}
    )
    (expected,) = offline("8-5=", max_tokens=40, seed=4, stop_ids=(2,))
    assert stopped.choices[0].token_ids == expected.response_ids.tolist()  # type: ignore[attr-defined]
    assert stopped.choices[0].prompt_token_ids == offline.tokenizer.encode("8-5=")  # type: ignore[attr-defined]


def test_without_a_seed_answers_differ(server: Server) -> None:
    options = {"model": "tiny", "prompt": "1", "max_tokens": 30, "temperature": 3, "extra_body": {"ignore_eos": True}}
    texts = {client(server).completions.create(**options).choices[0].text for _ in range(4)}
    assert len(texts) == 4


def test_the_prefix_cache_shows_in_the_usage(server: Server) -> None:
    prompt = [2 + i % 20 for i in range(100)]
    options: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "seed": 0}
    first, second = (client(server).completions.create(**options) for _ in range(2))
    details = [answer.usage.prompt_tokens_details for answer in (first, second) if answer.usage is not None]
    assert [d.cached_tokens for d in details if d is not None] == [0, 96], "six full pages of 16"
    assert first.choices[0].text == second.choices[0].text
    several = client(server).completions.create(**options, n=4)
    assert several.usage is not None
    assert several.usage.prompt_tokens == 100, "a prompt counts once, whatever n"
    assert several.usage.prompt_tokens_details is not None
    assert several.usage.prompt_tokens_details.cached_tokens == 96


def test_models(server: Server) -> None:
    assert [model.id for model in client(server).models.list()] == ["tiny"]
    assert client(server).models.retrieve("tiny").owned_by == "halfbyte"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client(server).models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client(server).completions.create(model="gpt-4", prompt="1")


def _mixed(index: int) -> dict[str, Any]:
    """A request unlike its neighbours."""
    return {
        "prompt": f"{index}*{index % 7 + 1}=",
        "max_tokens": 5 + index % 23,
        "seed": index // 3,
        "temperature": (0.7, 1.0, 2.0)[index % 3],
        "top_p": (1.0, 0.8)[index % 2],
    }


async def _streamed(api: openai.AsyncOpenAI, request: dict[str, Any]) -> tuple[str, int]:
    text, chunks, ids = "", 0, set()
    async for chunk in await api.completions.create(model="tiny", stream=True, **request):
        ids.add(chunk.id)
        chunks += 1
        text += chunk.choices[0].text
    assert len(ids) == 1, "every chunk belongs to one answer"
    return text, chunks


def test_a_hundred_streams_at_once_without_a_lost_or_crossed_answer(server: Server, offline: Offline) -> None:
    requests = [_mixed(i) for i in range(100)]

    async def all_at_once() -> list[tuple[str, int]]:
        async with async_client(server) as api:
            return await asyncio.gather(*(_streamed(api, request) for request in requests))

    got = asyncio.run(all_at_once())
    expected = [offline.text(**request) for request in requests]
    assert [text for text, _ in got] == expected
    assert len(set(expected)) > 50, "crossed answers would show"


def test_a_seed_gives_the_same_text_alone_and_among_fifty_others(server: Server) -> None:
    alone: dict[str, Any] = {"prompt": "13+29=", "max_tokens": 60, "seed": 77, "temperature": 2.0, "top_p": 0.95}
    alone["extra_body"] = {"ignore_eos": True}
    expected = client(server).completions.create(model="tiny", **alone).choices[0].text

    async def in_company() -> str:
        async with async_client(server) as api:
            others = [asyncio.create_task(_streamed(api, _mixed(i))) for i in range(50)]
            answer = await api.completions.create(model="tiny", **alone)
            await asyncio.gather(*others)
            return answer.choices[0].text

    assert asyncio.run(in_company()) == expected
