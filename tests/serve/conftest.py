"""One server for all tests that need nothing special."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_case import Offline, chat_folder

from halfbyte.serve.server import Server, background
from halfbyte.serve.settings import ServeSettings


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    settings = ServeSettings(str(folder), served_name="tiny", port=0, stream_seconds=0, kv_memory_mb=16)
    with background(settings) as running:
        yield running


@pytest.fixture(scope="session")
def offline(folder: Path) -> Offline:
    return Offline(str(folder))
