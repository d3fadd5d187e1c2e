"""A real chat model through the real client (HALFBYTE_SMOLLM2 names its folder)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from serve_case import async_client, client

from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.request import Request
from halfbyte.rollout.stop import first_stop
from halfbyte.serve.opening import open_served
from halfbyte.serve.prompts import prompt_key
from halfbyte.serve.server import background
from halfbyte.serve.settings import ServeSettings

FOLDER = Path(os.environ.get("HALFBYTE_SMOLLM2", "runs/smollm2-135m"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="run examples/smollm2.py, or set HALFBYTE_SMOLLM2"),
]
QUESTIONS = ["What is the capital of France?", "Schreibe das Wort Übergröße.", "Count from 1 to 9.", "Say 你好 twice."]


def test_chats_stream_as_the_engine_speaks() -> None:
    settings = ServeSettings(str(FOLDER), served_name="smollm2", port=0, max_length=512, kv_memory_mb=64)
    opened = open_served(settings)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tuple(opened.tokenizer.encode_chat(messages)) for messages in conversations]
    stop = (".\n", "5")
    requests = [
        Request(ids, SamplingParams(max_tokens=32, seed=i, stop=stop), key=prompt_key(ids))
        for i, ids in enumerate(prompts)
    ]
    expected = []
    for trajectory in opened.engine.generate(requests):
        text = opened.tokenizer.decode(trajectory.response_ids.tolist())
        found = first_stop(text, stop)
        expected.append(text if found is None else text[: found[0]])

    with background(settings, opened) as server:

        async def ask(api: Any, index: int) -> str:
            stream = await api.chat.completions.create(
                model="smollm2",
                messages=conversations[index],
                max_tokens=32,
                seed=index,
                stop=list(stop),
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def all_at_once() -> list[str]:
            async with async_client(server) as api:
                return await asyncio.gather(*(ask(api, i) for i in range(len(QUESTIONS))))

        assert asyncio.run(all_at_once()) == expected
        answer = client(server).chat.completions.create(
            model="smollm2", messages=conversations[0], max_tokens=8, seed=0, logprobs=True, top_logprobs=2
        )
        entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
        joined = b"".join(bytes(entry.bytes or []) for entry in entries or []).decode("utf-8", "replace")
        assert joined.startswith(answer.choices[0].message.content or "?")
