"""Who comes in, what is refused, what ends early: tokens, sizes, queue, time, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from serve_case import PATIENCE, Gate, Offline, async_client, client, metric, wait_until

from halfbyte.errors import ConfigError, UserError
from halfbyte.serve.opening import open_served
from halfbyte.serve.server import Server, background
from halfbyte.serve.settings import ServeSettings

ENDLESS: dict[str, Any] = {"model": "tiny", "prompt": "1+2=", "max_tokens": 240, "extra_body": {"ignore_eos": True}}


@contextmanager
def gated(folder: Path, **changes: Any) -> Iterator[tuple[Server, Gate]]:
    settings = ServeSettings(
        str(folder), served_name="tiny", port=0, kv_memory_mb=4, **{"stream_seconds": 0, **changes}
    )
    opened = open_served(settings)
    gate = Gate(opened)
    with background(settings, opened) as server:
        try:
            yield server, gate
        finally:
            gate.open()


def idle(server: Server) -> bool:
    names = ("active_requests", "kv_pages_used", "running_samples", "queue_length")
    return all(metric(server, f"halfbyte_{name}") == 0 for name in names)


def outcome(server: Server, name: str, endpoint: str = "completions") -> float:
    try:
        return metric(server, f'halfbyte_requests_total{{endpoint="{endpoint}",outcome="{name}"}}')
    except AssertionError:
        return 0.0


def test_a_client_that_leaves_a_stream_takes_its_samples_with_it(folder: Path) -> None:
    with gated(folder) as (server, gate):

        async def leave() -> None:
            async with async_client(server) as api:
                stream = await api.completions.create(**ENDLESS, n=3, stream=True)
                gate.let(5)
                await anext(aiter(stream))
                assert metric(server, "halfbyte_running_samples") == 3
                assert metric(server, "halfbyte_kv_pages_used") > 0
                await stream.close()

        gate.let(1)  # the headers come with the first token
        asyncio.run(leave())
        wait_until(lambda: outcome(server, "cancelled") == 1, "the server to notice")
        gate.let(2)
        wait_until(lambda: idle(server), "pages to be freed")
        assert metric(server, "halfbyte_engine_tokens_total") < 3 * 20


def test_a_client_that_leaves_before_its_answer_does_so_too(folder: Path) -> None:
    with gated(folder) as (server, gate):
        address = urlsplit(server.url)
        body = json.dumps({"model": "tiny", "prompt": "1+2=", "max_tokens": 240, "ignore_eos": True}).encode()
        connection = socket.create_connection((address.hostname, address.port))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        gate.let(3)
        wait_until(lambda: metric(server, "halfbyte_engine_tokens_total") >= 2, "tokens")
        connection.close()
        wait_until(lambda: outcome(server, "cancelled") == 1, "the server to notice")
        gate.let(2)
        wait_until(lambda: idle(server), "pages to be freed")


def test_a_client_that_leaves_in_its_body_is_forgotten(server: Server) -> None:
    before = outcome(server, "cancelled")
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    wait_until(lambda: metric(server, "halfbyte_active_requests") >= 1, "the request to arrive")
    connection.close()
    wait_until(lambda: outcome(server, "cancelled") == before + 1, "the server to notice")


def test_too_many_in_the_queue_are_told_to_come_back(folder: Path) -> None:
    with gated(folder, max_sequences=2, max_queue=2) as (server, gate), ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(client(server).completions.create, **{**ENDLESS, "max_tokens": 3}) for _ in range(4)]
        wait_until(lambda: metric(server, "halfbyte_active_requests") == 4, "four requests")
        wait_until(
            lambda: metric(server, "halfbyte_queue_length") == 4,
            "four samples",
        )
        with pytest.raises(openai.RateLimitError) as caught:
            client(server).completions.create(**ENDLESS)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "queue_full"
        gate.open()
        assert all(answer.result(PATIENCE).usage.completion_tokens == 3 for answer in answers)
        assert client(server).completions.create(**{**ENDLESS, "max_tokens": 2}).choices
        assert outcome(server, "overloaded") == 1


def test_one_request_larger_than_the_queue_is_taken_when_nothing_waits(folder: Path) -> None:
    with gated(folder, max_sequences=2, max_queue=0) as (server, gate):
        gate.open()
        answer = client(server).completions.create(**{**ENDLESS, "max_tokens": 2}, n=5)
        assert len(answer.choices) == 5


def test_a_request_that_takes_too_long_ends(folder: Path) -> None:
    with gated(folder, request_seconds=0.3) as (server, gate):
        with pytest.raises(openai.APIStatusError) as caught:
            client(server).completions.create(**ENDLESS)
        assert caught.value.status_code == 504
        gate.let(1)
        wait_until(lambda: idle(server), "its pages to be freed")
        assert outcome(server, "timeout") == 1


def test_a_stream_that_takes_too_long_ends_with_an_error_event(folder: Path) -> None:
    with gated(folder, request_seconds=1.0) as (server, gate):
        gate.let(2)
        stream = client(server).completions.create(**ENDLESS, stream=True)
        with pytest.raises(openai.APIError, match="took too long"):
            list(stream)
        gate.let(1)
        wait_until(lambda: idle(server), "its pages to be freed")


def test_bodies_and_prompts_have_a_limit(folder: Path) -> None:
    with gated(folder, max_body_bytes=2000, max_prompt=10, max_n=4) as (server, gate):
        gate.open()
        api = client(server).completions
        with pytest.raises(openai.APIStatusError) as caught:
            api.create(model="tiny", prompt="1" * 3000)
        assert caught.value.status_code == 413
        with pytest.raises(openai.BadRequestError) as refused:
            api.create(model="tiny", prompt="1" * 11)
        assert refused.value.code == "context_length_exceeded"
        assert api.create(model="tiny", prompt="1" * 10).choices
        with pytest.raises(openai.BadRequestError, match="choices"):
            api.create(model="tiny", prompt=["1", "2"], n=3)
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port)) as connection:  # no length stated
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            connection.sendall(b"BB8\r\n" + b" " * 3000 + b"\r\n")
            assert b" 413 " in connection.recv(1000)


def test_a_conversation_may_fill_the_model_and_no_more(server: Server, offline: Offline) -> None:
    messages: Any = [{"role": "user", "content": "1" * 200}]
    answer = client(server).chat.completions.create(
        model="tiny", messages=messages, seed=0, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_a_pool_smaller_than_the_model_limits_the_length(folder: Path) -> None:
    with gated(folder, max_length=64) as (server, gate):
        gate.open()
        with pytest.raises(openai.BadRequestError, match="more than 64"):
            client(server).completions.create(model="tiny", prompt="1", max_tokens=64)
        assert client(server).completions.create(model="tiny", prompt="1", max_tokens=63).choices


def test_every_path_but_health_demands_the_key(folder: Path) -> None:
    with gated(folder, api_key="s3cret") as (server, gate):
        gate.open()
        for path in ("/v1/models", "/version", "/metrics", "/v1/completions", "/nowhere"):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
                request = urllib.request.Request(server.url + path, headers=header)
                with pytest.raises(urllib.error.HTTPError) as caught:
                    urllib.request.urlopen(request, timeout=PATIENCE)
                assert caught.value.code == 401
                assert json.loads(caught.value.read())["error"]["code"] == "invalid_api_key"
        assert urllib.request.urlopen(f"{server.url}/health", timeout=PATIENCE).status == 200
        with pytest.raises(openai.AuthenticationError):
            client(server).models.list()
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0)
        assert api.models.list().data[0].id == "tiny"
        assert metric(server, "halfbyte_weight_version") == 0


def test_a_drain_finishes_what_runs_and_refuses_what_comes(folder: Path, offline: Offline) -> None:
    with gated(folder) as (server, gate):
        texts: list[str] = []

        def stream() -> None:
            chunks = client(server).completions.create(**{**ENDLESS, "max_tokens": 30}, seed=4, stream=True)
            texts.append("".join(chunk.choices[0].text for chunk in chunks))

        running = threading.Thread(target=stream)
        running.start()
        gate.let(3)
        wait_until(lambda: metric(server, "halfbyte_engine_tokens_total") >= 2, "tokens")
        server.drain()
        with pytest.raises(openai.APIStatusError) as caught:
            client(server).completions.create(**ENDLESS)
        assert caught.value.status_code == 503
        with pytest.raises(urllib.error.HTTPError) as health:
            urllib.request.urlopen(f"{server.url}/health", timeout=PATIENCE)
        assert health.value.code == 503
        gate.open()
        running.join(PATIENCE)
        assert texts == [offline.text("1+2=", max_tokens=30, seed=4, ignore_eos=True)]
    with pytest.raises(OSError, match=r".*"):
        urllib.request.urlopen(f"{server.url}/health", timeout=5)


def test_a_drain_does_not_wait_for_ever(folder: Path) -> None:
    with gated(folder, drain_seconds=0.2) as (server, gate), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client(server).completions.create, **ENDLESS)
        gate.let(1)
        wait_until(lambda: metric(server, "halfbyte_engine_tokens_total") >= 1, "a token")
        server.drain()
        gate.let(1)
        error = answer.exception(PATIENCE)
        assert isinstance(error, openai.APIStatusError)
        assert error.status_code == 503


def test_settings_out_of_range_are_refused() -> None:
    bad: list[dict[str, Any]] = [
        {"port": 70000},
        {"api_key": " "},
        {"api_key": "schlüssel"},
        {"max_queue": -1},
        {"request_seconds": 0},
        {"max_body_bytes": 0},
        {"kv_memory_mb": float("nan")},
        {"kv_memory_mb": float("inf")},
        {"follow_seconds": 0},
        {"served_name": ""},
    ]
    for change in bad:
        with pytest.raises(ConfigError) as caught:
            ServeSettings("tiny", **change)
        assert "schlüssel" not in str(caught.value)
    with pytest.raises(ConfigError, match="positions"):
        open_served(ServeSettings("tiny", max_length=257))


def test_a_port_that_is_taken_is_a_users_error(server: Server) -> None:
    settings = ServeSettings("tiny", port=urlsplit(server.url).port or 0)
    with pytest.raises(UserError, match="cannot listen"):
        Server(open_served(settings), settings)
