"""``halfbyte workers``, and where ray must not be."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_runs import run_config

from halfbyte.cli.main import main
from halfbyte.errors import ClusterError, MissingExtraError
from halfbyte.train.ray.cluster import Cluster
from halfbyte.train.ray.events import Events, read_wanted

SOURCE = Path(__file__).parents[3] / "src"


def test_the_command_shows_workers_and_asks_for_another_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workers", str(tmp_path), "3"]) == 2
    assert "there is no run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["workers", str(tmp_path)]) == 0
    assert "plays in its own process" in capsys.readouterr().out
    events = Events(tmp_path)
    events.add("start", "worker-0.1")
    events.add("connect", "", store="folder")
    for name in ("worker-0.1", "worker-1.2"):
        events.add("start", name)
        events.add("open", name, node="there", pid=7)
    events.add("died", "worker-1.2", reason="out of memory", refits=2, fetched_bytes=99, refit_seconds=0.5)
    with (tmp_path / "workers.jsonl").open("a") as file:
        file.write('{"time": 1, "eve')  # the run was killed here
    assert main(["workers", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "worker-0.1  plays  there pid 7"
    assert second == "worker-1.2  died  there pid 7  2 refits, 99 bytes, 0.50 s  (out of memory)"
    assert main(["workers", str(tmp_path), "12"]) == 0
    assert read_wanted(tmp_path) == 12
    assert main(["workers", str(tmp_path), "0"]) == 2
    assert read_wanted(tmp_path) == 12


def test_a_run_in_one_process_does_not_know_ray(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from halfbyte.cli.main import main\n"
        f"code = main(['train', '--steps', '1', '--out', {str(tmp_path / 'run')!r}, '--set', 'eval.prompts=2',\n"
        "    '--set', 'rollout.prompts_per_step=2', '--set', 'rollout.samples_per_prompt=2', '--threads', '1'])\n"
        "assert 'halfbyte.train.rollouts' in sys.modules\n"
        "found = [m for m in sys.modules if m.split('.')[0] == 'ray' or m.startswith('halfbyte.train.ray')]\n"
        "sys.exit(code or ', '.join(found) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_ray_the_message_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        return find(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    from halfbyte.train import run

    with pytest.raises(MissingExtraError, match=r"pip install 'halfbyte\[ray\]'"):
        run(run_config(tmp_path / "run", 2))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # nothing was begun


def test_a_head_that_is_gone_is_said_once_patience_is_over(cluster: Cluster) -> None:
    now, head = [100.0], cluster.head
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"  # bound, but nobody listens
        watch = Cluster(patience=30.0, clock=lambda: now[0])
        assert not watch.ours  # what it found is not its to end
        watch.close()
        watch.check()
        watch.head = closed
        now[0] += 29.0
        watch.check()
        watch.head = head  # it came back
        watch.check()
        watch.head = closed
        now[0] += 29.0
        watch.check()
        now[0] += 2.0
        with pytest.raises(ClusterError, match="has not answered for 31 s"):
            watch.check()


def test_a_client_s_address_is_refused_with_what_to_do() -> None:
    with pytest.raises(ClusterError, match="--ray-address auto"):
        Cluster("ray://somewhere:10001")
