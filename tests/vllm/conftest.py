"""A small architecture, weights for it, and the fake server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from fake_vllm import FakeVllm

from halfbyte.models.architecture import Architecture
from halfbyte.models.open_model import open_model
from halfbyte.refit.patch import Stamp
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.store import FilesystemStore


@pytest.fixture(scope="session")
def arch() -> Architecture:
    return replace(open_model("tiny")[0].architecture, max_positions=64)


@pytest.fixture
def over_http(tmp_path: Path) -> Iterator[str]:
    """Address at which any static file server shows ``tmp_path``."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()
    thread.join()


class Training:
    """Weights that change, in a store."""

    def __init__(self, folder: Path) -> None:
        draws = torch.Generator().manual_seed(1)
        shapes = {
            "model.embed_tokens.weight": (32, 16),
            "model.layers.0.mlp.gate.weight": (8, 16),
            "model.layers.0.self_attn.q_proj.weight": (16, 16),
            "model.layers.1.mlp.gate.weight": (8, 16),
            "lm_head.weight": (32, 16),
        }
        self.weights = {name: torch.randn(shape, generator=draws).bfloat16() for name, shape in shapes.items()}
        self.store = folder / "store"
        self.publisher = Publisher(FilesystemStore(self.store), "run-1")
        self.publisher.publish(self.weights, version=1)

    @property
    def stamp(self) -> Stamp:
        stamp = self.publisher.head.stamp
        assert stamp is not None
        return stamp

    def publish(self, *names: str) -> Stamp:
        """Change these tensors (all by default) and publish."""
        for name in names or tuple(self.weights):
            self.weights[name] = (self.weights[name].float() * 1.25 + 0.0625).bfloat16()
        self.publisher.publish(self.weights)
        return self.stamp


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


@pytest.fixture
def fake(training: Training) -> Iterator[FakeVllm]:
    it = FakeVllm(training.weights)
    yield it
    it.close()
