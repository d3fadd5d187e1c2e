"""Kill -9 at random times, and two hosts: the scripts under bench/, in their small forms."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.heavy


def result(script: str, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    line = [sys.executable, str(ROOT / "bench" / script), *arguments]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them find the run in one process."""
    return tmp_path_factory.mktemp("kills")


@pytest.mark.parametrize(("kind", "kills"), [("worker", 3), ("run", 2), ("head", 1)])
def test_a_kill_at_any_time_changes_nothing(folder: Path, kind: str, kills: int) -> None:
    found = result("ray_kills.py", kind, "--kills", str(kills), "--steps", "60", "--out", str(folder))
    assert found["kills"] == kills
    assert found["metrics_identical"]
    assert found["weights_identical"]
    assert found["store_good"]
    assert found["store_version"]
    assert "duplicates" not in found["events"]
    assert found["codes"][-1] == 0
    assert found["codes"][:-1] == [-9 if kind == "run" else 2] * (len(found["codes"]) - 1)
    if kind == "worker":
        assert found["events"]["died"] == kills
    if kind == "head":
        assert "the head of the Ray cluster has not answered" in (folder / "head.log").read_text()


def test_a_worker_on_another_host_follows_over_a_slow_link(tmp_path: Path) -> None:
    if reason := runpy.run_path(str(ROOT / "bench" / "two_hosts.py"))["possible"]():
        pytest.skip(f"two hosts: {reason}")
    found = result("two_hosts.py", "--mbit", "20", "--steps", "4", "--out", str(tmp_path))
    assert found["identical"]
    assert found["refits"] == found["steps"] == 4
    # what came over the link to the worker: the versions it took, and beside them only what Ray says
    assert found["refit_bytes"] <= found["link_bytes_to_worker"] <= found["refit_bytes"] + 4_000_000
    later = found["refit_bytes"] - found["first_version_bytes"]
    assert later < 4 * found["first_version_bytes"]
