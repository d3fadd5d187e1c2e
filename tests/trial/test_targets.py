"""Servers that the trial starts: up when healthy, down with all their children, and their last words shown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import fake_server
import psutil
import pytest
from fake_server import FakeServer, Script, write_script
from trial_case import answers

from halfbyte.trial.client import Client, Endpoint, Reply, open_client
from halfbyte.trial.errors import UnavailableError
from halfbyte.trial.settings import Target
from halfbyte.trial.targets import Server, command_line


def target(folder: Path, *command: str, **more: object) -> Target:
    write_script(folder / "script.json", Script(answers=answers(4)))
    parts = command or (sys.executable, fake_server.__file__, "--port", "{port}", "script.json")
    return Target.model_validate({"serve": list(parts), **more})


def with_client(work: Callable[[Client], Awaitable[object]], timeout: float = 60.0, retries: int = 0) -> None:
    async def main() -> None:
        async with open_client(timeout, retries) as client:
            await work(client)

    asyncio.run(main())


def test_a_server_goes_up_and_down_with_its_children(tmp_path: Path) -> None:
    """The command starts a shell that starts the server: both are gone afterwards."""
    shell = f"{sys.executable} {fake_server.__file__} --port {{port}} script.json & wait"

    async def work(client: Client) -> None:
        server = Server("baseline", target(tmp_path, "sh", "-c", shell), tmp_path, client)
        assert not server.up
        await server.start()
        assert server.up
        assert server.version == "fake 1.0"
        assert server.endpoint.model == "fake"
        assert server.pid is not None
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert len(tree) == 2
        await server.stop()
        gone, alive = psutil.wait_procs(tree, timeout=60)
        assert (len(gone), alive) == (2, [])
        assert not server.up

    with_client(work)


def test_a_command_that_ends_is_shown_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('no such model: x'); sys.exit(3)"

    async def work(client: Client) -> None:
        server = Server("candidate", target(tmp_path, sys.executable, "-c", code, "{port}"), tmp_path, client)
        with pytest.raises(UnavailableError, match=r"(?s)ended with code 3.*no such model: x"):
            await server.start()
        assert not server.up
        missing = Server("candidate", target(tmp_path, "no-such-program-here", "{port}"), tmp_path, client)
        with pytest.raises(UnavailableError, match="cannot be started"):
            await missing.start()

    with_client(work)


def test_a_server_that_never_gets_healthy_is_given_up_and_stopped(tmp_path: Path) -> None:
    code = "import sys, threading; print('loading', flush=True); threading.Event().wait()"

    async def work(client: Client) -> None:
        slow = target(tmp_path, sys.executable, "-c", code, "{port}", start_timeout=1.0)
        server = Server("candidate", slow, tmp_path, client)
        with pytest.raises(UnavailableError, match="was not healthy after 1 s"):
            await server.start()
        assert server.pid is None

    with_client(work)
    assert not [p for p in psutil.process_iter(["cmdline"]) if code in (p.info["cmdline"] or [])]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the parent's death is a signal on Linux only")
def test_no_server_outlives_a_trial_that_is_killed(tmp_path: Path) -> None:
    write_script(tmp_path / "script.json", Script())
    code = f"""
import asyncio, sys
from pathlib import Path
from halfbyte.trial.client import open_client
from halfbyte.trial.settings import Target
from halfbyte.trial.targets import Server
async def main():
    async with open_client(60) as client:
        command = [sys.executable, {fake_server.__file__!r}, "--port", "{{port}}", "script.json"]
        server = Server("baseline", Target(serve=command), Path({str(tmp_path)!r}), client)
        await server.start()
        print(server.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([server], timeout=60)[1] == []


def test_placeholders_and_our_own_command() -> None:
    given = Target(
        serve=("halfbyte", "serve", "m", "--port={port}", "--kv-memory-mb", "{kv_memory_mb}"), kv_memory_mb=72.5
    )
    expected = [sys.executable, "-m", "halfbyte", "serve", "m", "--port=8123", "--kv-memory-mb", "72.5"]
    assert command_line(given, 8123) == expected


def body(text: str, stream: bool = True) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "seed": 1, "stream": stream}


def test_a_reply_is_what_the_server_said() -> None:
    script = Script(answers={"a": "right"}, calls={"b": ("book", '{"day": 1}')}, tokens=9)
    with FakeServer(script) as fake:

        async def work(client: Client) -> None:
            endpoint = Endpoint(fake.url, "fake", {})
            for stream in (True, False):
                reply = await client.ask(endpoint, "/chat/completions", body("a", stream))
                assert (reply.text, reply.finish_reason, reply.error) == ("right", "stop", None)
                assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (8, 9, 0)
                assert (reply.ttft is not None) == stream
                assert reply.latency >= (reply.ttft or 0.0)
                called = await client.ask(endpoint, "/chat/completions", {**body("b", stream), "tools": [{}]})
                assert json.loads(called.calls) == [{"name": "book", "arguments": '{"day": 1}'}]

        with_client(work)


def test_retries_only_where_they_are_asked_for() -> None:
    with FakeServer(Script(faults={"a": "http 500"})) as fake:
        for retries in (0, 2):
            fake.bodies.clear()

            async def work(client: Client, retries: int = retries) -> None:
                reply = await client.ask(Endpoint(fake.url, "fake", {}), "/chat/completions", body("a"))
                assert (reply.attempts, reply.error) == (retries + 1, 'http 500: {"error": {"message": "scripted"}}')

            with_client(work, retries=retries)
            assert len(fake.bodies) == retries + 1


def test_no_more_requests_in_flight_than_allowed_and_none_crossed() -> None:
    """30 requests, 5 at a time: the fifth is let in, a sixth is not, and every reply is its own request's."""
    import threading

    texts = [f"question {i}" for i in range(30)]
    inside, most, lock = [0], [0], threading.Lock()
    gate = threading.Barrier(5)

    def on_request(_: int) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        gate.wait()  # all five are here at once
        with lock:
            inside[0] -= 1

    with FakeServer(Script(answers={text: f"to {text}" for text in texts}), on_request=on_request) as fake:
        replies: dict[int, Reply] = {}

        async def work(client: Client) -> None:
            bodies = [body(text) for text in texts]
            await client.ask_all(Endpoint(fake.url, "fake", {}), "/chat/completions", bodies, 5, replies.__setitem__)

        with_client(work)
    assert most[0] == 5
    assert [replies[i].text for i in range(30)] == [f"to {text}" for text in texts]
