"""Log-probs that clients read are the engine's own, bit for bit, and those of alternatives what drawing them had given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from serve_case import Offline, client

from halfbyte.models.trajectory import SamplingParams
from halfbyte.serve.server import Server

CASES: list[dict[str, Any]] = [{}, {"temperature": 1.7}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.8}]


def ids_of(offline: Offline, entries: list[str]) -> list[int]:
    out = [offline.tokenizer.token_id(text) for text in entries]
    assert all(token is not None for token in out)
    return [token for token in out if token is not None]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_are_those_of_scoring(
    server: Server, offline: Offline, case: dict[str, Any], stream: bool
) -> None:
    prompt = "3*5="
    options: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "seed": 6, "logprobs": 3, **case}
    answer = client(server).completions.create(**options, stream=stream)
    parts = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    merged = [part.logprobs for part in parts if part.logprobs is not None]
    tokens = [t for m in merged for t in m.tokens]
    values = [v for m in merged for v in m.token_logprobs]
    tops = [t for m in merged for t in m.top_logprobs]
    offsets = [o for m in merged for o in m.text_offset]
    (expected,) = offline(prompt, max_tokens=12, seed=6, **case)
    ids = ids_of(offline, tokens)
    assert ids == expected.response_ids.tolist()
    sampling = SamplingParams(**case)
    scored = offline.engine.score(offline.tokenizer.encode(prompt), ids, sampling, expected.supports)
    assert np.array_equal(np.float32(values), scored)
    text = "".join(part.text for part in parts)
    assert [text[o : o + 1] for o in offsets][: len(text)] == list(text), "a token a character here"
    for position, top in enumerate(tops):
        for other, value in top.items():
            swapped = [*ids[:position], *ids_of(offline, [other])]
            supports = None if expected.supports is None else expected.supports[: position + 1]
            again = offline.engine.score(offline.tokenizer.encode(prompt), swapped, sampling, supports)
            assert np.float32(value) == again[-1]
        drawn = tokens[position]
        others = sorted((v for t, v in top.items() if t != drawn), reverse=True)
        assert top[drawn] == values[position]
        assert len(others) <= 3
        if "top_p" not in case:
            assert len(top) in (3, 4)
            assert max(top.values()) == max(others[0], top[drawn])


def test_chat_logprobs(server: Server, offline: Offline) -> None:
    messages: Any = [{"role": "user", "content": "4*4"}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 10, "seed": 2}
    answer = client(server).chat.completions.create(**options, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    (expected,) = offline("4*4\n=", max_tokens=10, seed=2)
    assert np.array_equal(np.float32([e.logprob for e in content]), expected.logprobs)
    assert all(len(e.top_logprobs) == 2 for e in content)
    assert all(e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in content)
    plain = client(server).chat.completions.create(**options, logprobs=True)
    assert [e.top_logprobs for e in plain.choices[0].logprobs.content or []] == [[]] * len(content)  # type: ignore[union-attr]
    none = client(server).chat.completions.create(**options)
    assert none.choices[0].logprobs is None
    stream = client(server).chat.completions.create(**options, logprobs=True, top_logprobs=2, stream=True)
    streamed = [e for c in stream for e in (c.choices[0].logprobs.content or [] if c.choices[0].logprobs else [])]
    assert streamed == content


def test_asking_for_logprobs_changes_no_token(server: Server) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "6*6=", "max_tokens": 20, "seed": 9, "top_p": 0.9}
    api = client(server)
    texts = {api.completions.create(**options, logprobs=n).choices[0].text for n in (None, 0, 5)}
    assert len(texts) == 1
