"""One run as the child process does it: killed before any of its file operations, it ends with the same results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from study_case import KilledError

from halfbyte.errors import NumericsError
from halfbyte.files import write_object
from halfbyte.study import worker
from halfbyte.study.arms import BUILT_IN, configured
from halfbyte.study.records import read_run

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 4,
    "rollout.kv_memory_mb": 4.0,
    "env.max_prompt_tokens": 32,
    "eval.prompts": 8,
    "train.steps": 2,
    "train.checkpoint_every": 1,
    "train.save_trajectories_every": 0,
    "train.threads": 1,
    "train.delta_precision": "w4a4kv4",
    "learner.lr": 1e-3,
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prepare(folder: Path, arm: str = "bf16") -> Path:
    config = configured({}, {**SMALL, **BUILT_IN[arm].sets, "train.out": str(folder)}, "test")
    folder.mkdir(parents=True)
    write_object(folder / "label.json", {"arm": arm, "seed": 0, "group": "g"})
    task = {"config": config.to_json(), "deployed": ["bf16", "w4a4kv4"], "keep_checkpoints": False}
    write_object(folder / "task.json", task)
    return folder


def numbers(folder: Path) -> dict[str, Any]:
    """All that a run has measured, but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines],
        "deployed": json.loads((folder / "deployed.json").read_text()),
        "model": (folder / "model" / "model.safetensors").read_bytes(),
        "left": sorted(p.name for p in folder.iterdir() if p.name in ("checkpoints", "refit", "model", "summary.json")),
    }


@contextmanager
def killed_before(moment: int, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Raise before the ``moment``-th operation that changes which files there are; the names of those done are given."""
    from halfbyte.train import run_folder, state, trainer

    done: list[str] = []

    def wrapped(name: str, original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if len(done) == moment:
                raise KilledError
            done.append(name)
            return original(*arguments, **named)

        return call

    with patch.context() as context:
        context.setattr(run_folder.RunFolder, "append", wrapped("append", run_folder.RunFolder.append))
        context.setattr(run_folder, "write_atomic", wrapped("write", run_folder.write_atomic))
        context.setattr(state, "write_atomic", wrapped("state", state.write_atomic))
        context.setattr(trainer, "save_state", wrapped("checkpoint", trainer.save_state))
        context.setattr(worker, "evaluate_deployed", wrapped("deployed", worker.evaluate_deployed))
        context.setattr(worker, "write_object", wrapped("finish", worker.write_object))
        context.setattr(worker.shutil, "rmtree", wrapped("clear", shutil.rmtree))
        yield done


@pytest.mark.parametrize("which", ["the last of each kind", pytest.param("all", marks=pytest.mark.slow)])
def test_killed_before_any_operation_it_ends_with_the_same_numbers(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(tmp_path / "whole")
    with killed_before(-1, monkeypatch) as operations:
        assert worker.work(whole) == 0
    expected = numbers(whole)
    assert expected["left"] == ["model", "summary.json"]
    assert {"append", "checkpoint", "deployed", "finish", "clear"} <= set(operations)
    finished = expected["deployed"]
    assert finished["bf16"]["eval/accuracy"] == expected["metrics"][-1]["eval/accuracy"], "served as it was trained"
    last = sorted({name: i for i, name in enumerate(operations)}.values())
    for moment in range(len(operations)) if which == "all" else last:
        folder = prepare(tmp_path / f"k{moment}")
        with killed_before(moment, monkeypatch), pytest.raises(KilledError):
            worker.work(folder)
        assert worker.work(folder) == 0
        assert numbers(folder) == expected, (moment, operations[moment])
        shutil.rmtree(folder)


def test_a_trained_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(tmp_path / "run", "qat")
    assert worker.work(folder) == 0
    monkeypatch.setattr(worker, "run", lambda *a, **k: pytest.fail("trained again"))
    (folder / "deployed.json").unlink()
    assert worker.work(folder) == 0
    found = read_run(folder)
    assert (found.status, found.arm, found.steps) == ("finished", "qat", 2)
    assert found.deployed["w4a4kv4"] == found.final, "served as it was trained"


def test_updates_of_bf16_are_counted_in_fp4_coordinates_too(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "run")
    assert worker.work(folder) == 0
    metrics = read_run(folder).metrics
    assert 0 < metrics["refit/changed_codes"] < metrics["refit/changed"]


def test_numbers_that_are_not_finite_end_a_run_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(tmp_path / "run")

    def diverge(*arguments: Any, **named: Any) -> int:
        raise NumericsError("a gradient is not finite", where="layer 0")

    monkeypatch.setattr(worker, "run", diverge)
    assert worker.work(folder) == 0
    assert json.loads((folder / "outcome.json").read_text())["message"].startswith("a gradient is not finite")
    assert not (folder / "deployed.json").exists()


STUDY = """
[study]
name = "s"
out = "{out}"
arms = ["bf16", "qat", "post-hoc"]
seeds = [0, 1]
processes = 2
[base]
rollout = {{ prompts_per_step = 2, samples_per_prompt = 4, kv_memory_mb = 4.0 }}
env = {{ max_prompt_tokens = 32 }}
eval = {{ prompts = 8, every = 2 }}
train = {{ steps = {steps}, checkpoint_every = 3 }}
"""


def spawn(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    file = folder / "study.toml"
    file.write_text(STUDY.format(out=folder / "out", steps=steps))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-m", "halfbyte", "study", "run", str(file)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def without_times(folder: Path) -> dict[str, Any]:
    """What a study has found, but for times and for how often its plan was looked at."""
    data = json.loads((folder / "out" / "study.json").read_text())
    for group in data["groups"]:
        del group["pareto"]
        for row in group["arms"]:
            del row["seconds"], row["rollout_seconds_per_1k_tokens"]
    for run in data["runs"]:
        del run["seconds"]
    data["history"] = [entry["digest"] for entry in data["history"]]
    return data  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_study_killed_again_and_again_gives_what_an_unbroken_one_gives(tmp_path: Path) -> None:
    """Also: two studies with the same seeds give the same results."""
    steps = 12
    for name in ("one", "two"):
        assert spawn(tmp_path / name, steps).wait(timeout=600) == 0
    assert without_times(tmp_path / "one") == without_times(tmp_path / "two")
    for seconds in (2.0, 5.0, 8.0, 11.0, 6.5, 9.5):
        process = spawn(tmp_path / "killed", steps)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.5)
    finished = {p: p.stat().st_mtime_ns for p in (tmp_path / "killed" / "out").glob("runs/*/*/deployed.json")}
    assert spawn(tmp_path / "killed", steps).wait(timeout=600) == 0
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "one")
    assert all(p.stat().st_mtime_ns == then for p, then in finished.items()), "no finished run was touched"


@pytest.mark.slow
def test_an_interrupted_study_says_so_and_goes_on(tmp_path: Path) -> None:
    process = spawn(tmp_path / "s", 400)
    metrics = tmp_path / "s" / "out" / "runs" / "qat" / "seed_0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or b'"train"' not in metrics.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a test run in the background would pass on as ignored
    try:
        assert process.wait(timeout=120) == 130
    finally:
        process.kill()
    assert list(metrics.parent.glob("checkpoints/step_*")), "it ended after a step, with a checkpoint"
