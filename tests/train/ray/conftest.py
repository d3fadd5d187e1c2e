"""One Ray for all tests, and a place for modules that workers import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfbyte.train.ray.cluster import Cluster


@pytest.fixture(scope="session")
def worker_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the import path of this process and of workers."""
    folder = tmp_path_factory.mktemp("worker_modules")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), before] if before else [str(folder)])
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def cluster(worker_modules: Path) -> Iterator[Cluster]:
    """A running Ray; runs find and use it."""
    source = str(Path(__file__).parents[3] / "src")
    os.environ["PYTHONPATH"] += os.pathsep + source  # an installed halfbyte would do
    made = Cluster(memory_mb=128.0)
    yield made
    made.close()
