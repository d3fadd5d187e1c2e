"""Servers over the tiny policy, engines whose steps wait for the test, and what the engine says offline."""

from __future__ import annotations

import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai

from halfbyte.models.open_model import model_folder, open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request
from halfbyte.serve.opening import Opened
from halfbyte.serve.prompts import prompt_key
from halfbyte.serve.server import Server

TEMPLATE = (
    "{% if tools %}{% for t in tools %}({{ t.function.name }}){% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
#: Generous: nothing here takes a second on an idle machine.
PATIENCE = 60.0


def chat_folder(folder: Path) -> Path:
    """The tiny policy with a chat template."""
    shutil.copytree(model_folder("tiny"), folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def client(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE, **options)


def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


class Offline:
    """An engine of one's own."""

    def __init__(self, model: str = "tiny", precision: str = "w4a4kv4") -> None:
        checkpoint, self.tokenizer = open_model(model)
        self.engine = Engine(
            checkpoint.architecture,
            precision_from(precision),
            checkpoint.tensors,
            detokeniser=self.tokenizer,
            options=EngineOptions(kv_memory_mb=16),
        )

    def __call__(self, prompt: str | Sequence[int], n: int = 1, **sampling: Any) -> list[Trajectory]:
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        return self.engine.generate([Request(ids, SamplingParams(**sampling), n=n, key=prompt_key(ids))])

    def text(self, prompt: str | Sequence[int], **sampling: Any) -> str:
        return self.tokenizer.decode(self(prompt, **sampling)[0].response_ids.tolist())


class Gate:
    """Holds an engine's steps back: ``open`` lets them run, ``let`` a number of them; ``reached``: one has come this far."""

    def __init__(self, opened: Opened) -> None:
        self._semaphore = threading.Semaphore(0)
        self._open = threading.Event()
        self.reached = threading.Event()
        step = opened.engine.step

        def gated() -> Any:
            self.reached.set()
            while not self._open.is_set() and not self._semaphore.acquire(timeout=0.01):
                pass
            return step()

        opened.engine.step = gated  # type: ignore[method-assign]

    def let(self, steps: int) -> None:
        self._semaphore.release(steps)

    def open(self) -> None:
        self._open.set()


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Poll for something another thread does; a generous limit is a failure, never a pass."""
    limit = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.005)


def metric(server: Server, name: str) -> float:
    """A sample of ``/metrics``, labels included in the name."""
    headers = {} if server.settings.api_key is None else {"Authorization": f"Bearer {server.settings.api_key}"}
    request = urllib.request.Request(f"{server.url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as page:
        for line in page.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} is not among the metrics")
