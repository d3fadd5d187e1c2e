"""A scripted OpenAI-compatible server: right answers with a given probability, and every fault a trial must survive.

In the test's own process (``with FakeServer(...)``, threads), or started by a trial as a process of its own
(``python fake_server.py --port N CONFIG.json``). Whether an answer is right depends on task, seed and name alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULTS = ("http 500", "http 400", "hang", "truncated", "no done", "no reason", "garbage event", "wrong shape", "garbage",
          "disconnect", "error event")  # fmt: skip


@dataclass
class Script:
    """What a server does.

    Arguments:
        answers: user's text -> right answer (text), of every task.
        passing: probability of a right answer.
        passing_of: user's text -> probability, where it differs.
        faults: user's text -> fault, see ``FAULTS``.
        seconds: of a response.
        tokens: of a response; the answer repeated would change scores, so only usage tells.
        template: tokens that the chat template adds to every prompt.
        cache: a prefix cache: a prompt seen before is reported as cached.
        resettable: it has /reset_prefix_cache.
        calls: user's text -> (name, arguments) of a tool call in place of the text.
        weights_bytes, kv_bytes, kv_tokens: for /metrics; None for no /metrics.
        ballast_mb: memory taken, for servers that are processes.
        token: bearer token that it demands.
    """

    name: str = "fake"
    answers: dict[str, str] = field(default_factory=dict)
    passing: float = 1.0
    passing_of: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 5
    template: int = 7
    cache: bool = False
    resettable: bool = False
    calls: dict[str, tuple[str, str]] = field(default_factory=dict)
    weights_bytes: int | None = None
    kv_bytes: int = 0
    kv_tokens: int = 0
    ballast_mb: int = 0
    token: str | None = None
    usage: bool = True


class FakeServer:
    """The server, from ``with`` to its end.

    Arguments:
        on_request: called with the number of each completion request (from 1) before it is answered.
    """

    def __init__(self, script: Script, port: int = 0, on_request: Callable[[int], None] | None = None) -> None:
        self.script, self.on_request = script, on_request
        self.bodies: list[dict[str, Any]] = []
        self.seen: set[str] = set()
        self.hits = self.queries = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.ballast = bytearray(b"\x01") * (script.ballast_mb << 20)
        handler = type("Handler", (_Handler,), {"fake": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """With the /v1."""
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self) -> FakeServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def right(self, said: str, seed: int) -> bool:
        """Whether the answer to ``said`` is right."""
        share = self.script.passing_of.get(said, self.script.passing)
        drawn = int.from_bytes(hashlib.sha256(f"{self.script.name}|{said}|{seed}".encode()).digest()[:8], "big")
        return drawn < share * 2.0**64


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        script = self.fake.script
        if self.path == "/health":
            self._send(200, "{}")
        elif self.path == "/v1/models" and self._known():
            self._send(200, json.dumps({"object": "list", "data": [{"id": script.name}]}))
        elif self.path == "/version":
            self._send(200, json.dumps({"version": f"{script.name} 1.0"}))
        elif self.path == "/metrics" and script.weights_bytes is not None:
            lines = {
                "halfbyte_weights_bytes": script.weights_bytes,
                "halfbyte_kv_bytes": script.kv_bytes,
                "halfbyte_kv_capacity_tokens": script.kv_tokens,
                "halfbyte_prompt_tokens_total": self.fake.queries,
                "halfbyte_cached_prompt_tokens_total": self.fake.hits,
            }
            self._send(200, "".join(f"# HELP {n} x\n# TYPE {n} gauge\n{n} {v}\n" for n, v in lines.items()))
        else:
            self._send(404, "{}")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/reset_prefix_cache" and self.fake.script.resettable:
            self.fake.seen.clear()
            self._send(200, "{}")
        elif self.path in ("/v1/chat/completions", "/v1/completions") and self._known():
            self._complete(json.loads(raw))
        else:
            self._send(404, "{}")

    def _known(self) -> bool:
        token = self.fake.script.token
        return token is None or self.headers.get("Authorization") == f"Bearer {token}"

    def _complete(self, body: dict[str, Any]) -> None:
        fake, script = self.fake, self.fake.script
        with fake.lock:
            fake.bodies.append(body)
            number = len(fake.bodies)
        if fake.on_request is not None:
            fake.on_request(number)
        messages = body.get("messages") or [{"role": "user", "content": body.get("prompt")}]
        said = str(messages[-1]["content"])
        if script.seconds:
            time.sleep(script.seconds)
        prompt = script.template + sum(len(str(m["content"]).split()) for m in messages)
        with fake.lock:
            cached = prompt if script.cache and said in fake.seen else 0
            fake.seen.add(said)
            fake.queries += prompt
            fake.hits += cached
        fault = script.faults.get(said)
        if fault in ("http 500", "http 400"):
            self._send(int(fault[-3:]), '{"error": {"message": "scripted"}}')
            return
        if fault == "hang":
            fake.closing.wait()
            return
        if fault == "disconnect":
            self.close_connection = True
            return
        text = script.answers.get(said, "") if fake.right(said, body["seed"]) else "no idea"
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": script.tokens,
            "total_tokens": prompt + script.tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not script.usage:
            usage = {}
        call = script.calls.get(said) if body.get("tools") else None
        if body["stream"]:
            self._stream(body, text, call, usage, fault)
        elif fault == "garbage":
            self._send(200, "<html>busy</html>")
        else:
            answer = {"role": "assistant", "content": text} if call is None else _called(call)
            choice = {"index": 0, "message": answer, "text": text, "finish_reason": "stop"}
            self._send(200, json.dumps({"choices": [choice], "usage": usage}))

    def _stream(self, body: dict[str, Any], text: str, call: Any, usage: Mapping[str, Any], fault: str | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if fault == "garbage":
            self.wfile.write(b"\x00\xff not an event stream \x80" * 20)
            return
        half = len(text) // 2
        pieces = [{"content": text[:half]}, {"content": text[half:]}] if call is None else _call_pieces(call)
        chat = "messages" in body
        for number, piece in enumerate(pieces):
            shown = {"index": 0, "delta": piece} if chat else {"index": 0, "text": piece["content"]}
            self._event({"choices": [{**shown, "finish_reason": None}]})
            if number == 0:
                if fault == "truncated":
                    return
                if fault == "garbage event":
                    self.wfile.write(b'data: {"choices": [{"ind\n\n')
                if fault == "wrong shape":
                    self._event({"choices": {"delta": 3}})
                if fault == "error event":
                    self._event({"error": {"message": "out of memory"}})
        reason = None if fault == "no reason" else "stop" if call is None else "tool_calls"
        last = {"index": 0, "delta": {}} if chat else {"index": 0, "text": ""}
        self._event({"choices": [{**last, "finish_reason": reason}]})
        if usage:
            self._event({"choices": [], "usage": usage})
        if fault != "no done":
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _called(call: tuple[str, str]) -> dict[str, Any]:
    function = {"name": call[0], "arguments": call[1]}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def _call_pieces(call: tuple[str, str]) -> list[dict[str, Any]]:
    name, arguments = call
    half = len(arguments) // 2
    first = {"index": 0, "id": "1", "type": "function", "function": {"name": name, "arguments": arguments[:half]}}
    return [{"tool_calls": [first]}, {"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]}]


def write_script(path: Path, script: Script) -> None:
    """For a server that is a process."""
    path.write_text(json.dumps(asdict(script)), encoding="utf-8")


def main() -> None:
    """``python fake_server.py --port N CONFIG.json``; serves until it is killed."""
    port, config = int(sys.argv[2]), Path(sys.argv[3])
    script = Script(**json.loads(config.read_text(encoding="utf-8")))
    with FakeServer(script, port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
