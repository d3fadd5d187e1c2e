"""``halfbyte bench serve``: tokens a second through the server beside the bare engine, on the same requests."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from halfbyte.errors import UserError
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.request import Request
from halfbyte.serve.opening import open_served
from halfbyte.serve.prompts import prompt_key
from halfbyte.serve.settings import ServeSettings

__all__ = ["ServeRow", "race"]

Tokens = list[list[int]]


@dataclass(frozen=True)
class ServeRow:
    """The server beside the bare engine.

    Arguments:
        streamed: whether tokens came one by one, or each answer at its end.
        step_share: of the server's time, what it spent inside the engine's steps.
        same_tokens: every answer had the tokens that the bare engine drew for its request.
    """

    model: str
    precision: str
    streams: int
    tokens: int
    streamed: bool
    tokens_per_second: float
    engine_tokens_per_second: float
    step_share: float
    rounds: int
    same_tokens: bool

    @property
    def ratio(self) -> float:
        """Server over engine."""
        return self.tokens_per_second / self.engine_tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return {**asdict(self), "ratio": self.ratio}


def race(model: str, precision: str, *, streams: int, prompt: int, tokens: int, repeats: int) -> Iterator[ServeRow]:
    """Two rows, streamed and whole. Engine and server take turns, each in a process of its own with equal settings.

    Raises:
        UserError: the model cannot be used, or the server does not start.
    """
    settings = ServeSettings(model, precision, max_sequences=streams, max_length=prompt + tokens, prefix_cache=False)
    engine = open_served(settings).engine
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(engine.arch.vocab_size, (streams, prompt), generator=generator).tolist()
    with _server(settings) as url:
        _bare(engine, prompts, tokens)
        for streamed in (True, False):
            _through(url, model, prompts, tokens, streamed)
            bare, through, shares, same = [], [], [], True
            for _ in range(repeats):
                seconds, expected = _bare(engine, prompts, tokens)
                bare.append(streams * tokens / seconds)
                before = _step_seconds(url)
                seconds, got = _through(url, model, prompts, tokens, streamed)
                through.append(streams * tokens / seconds)
                shares.append((_step_seconds(url) - before) / seconds)
                same = same and got == expected
            yield ServeRow(
                model,
                precision,
                streams,
                tokens,
                streamed,
                statistics.median(through),
                statistics.median(bare),
                statistics.median(shares),
                repeats,
                same,
            )


def _bare(engine: Engine, prompts: Tokens, tokens: int) -> tuple[float, Tokens]:
    requests = [
        Request(tuple(ids), SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True), key=prompt_key(tuple(ids)))
        for i, ids in enumerate(prompts)
    ]
    began = time.perf_counter()
    out = engine.generate(requests)
    return time.perf_counter() - began, [trajectory.response_ids.tolist() for trajectory in out]


def _through(url: str, model: str, prompts: Tokens, tokens: int, streamed: bool) -> tuple[float, Tokens]:
    bodies = [
        {
            "model": model,
            "prompt": ids,
            "max_tokens": tokens,
            "seed": i,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": streamed,
        }
        for i, ids in enumerate(prompts)
    ]
    began = time.perf_counter()
    answers = asyncio.run(_all(url, [json.dumps(body).encode() for body in bodies]))
    seconds = time.perf_counter() - began
    return seconds, [_token_ids(answer, streamed) for answer in answers]


async def _all(url: str, bodies: Sequence[bytes]) -> list[bytes]:
    return await asyncio.gather(*(_post(url, body) for body in bodies))


async def _post(url: str, body: bytes) -> bytes:
    """A client that costs next to nothing: the bytes of the answer, looked at when the clock has stopped."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


def _token_ids(answer: bytes, streamed: bool) -> list[int]:
    lines = answer.split(b"\r\n\r\n", 1)[1].decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [token for event in events for choice in json.loads(event)["choices"] for token in choice["token_ids"]]


def _step_seconds(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as page:
        for line in page.read().decode().splitlines():
            if line.startswith("halfbyte_engine_step_seconds_total "):
                return float(line.split()[1])
    raise AssertionError("the server does not count its steps")


@contextmanager
def _server(settings: ServeSettings) -> Iterator[str]:
    """The server as users start it; its address."""
    flags = {
        "--precision": settings.precision,
        "--port": 0,
        "--max-sequences": settings.max_sequences,
        "--max-length": settings.max_length,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    command = [sys.executable, "-m", "halfbyte", "serve", settings.model, *words, "--no-prefix-cache"]
    environment = {name: value for name, value in os.environ.items() if name != "HALFBYTE_API_KEY"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise UserError("the server did not start", where=" ".join(command))
            yield str(json.loads(line)["url"])
        finally:
            process.terminate()
