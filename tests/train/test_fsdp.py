"""Whole runs on several ranks, as torchrun starts them: the numbers of one process, checkpoints that any number of ranks goes
on from, one store, and failures of one rank that end all with one message."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from small_run import small_config
from torchrun import command, environment, torchrun

from halfbyte.config import Config
from halfbyte.errors import CheckpointError
from halfbyte.models.shards import open_tensors
from halfbyte.refit.store import FilesystemStore
from halfbyte.refit.verify import verify_store
from halfbyte.train import run
from halfbyte.train.run_folder import RunFolder
from halfbyte.train.state import latest_checkpoint

pytestmark = pytest.mark.usefixtures("torch_single_thread")

STEPS = 4
#: Sorting, paid by the sevens; on the rank and in the place that the process's environment names it fails after some calls.
ENVIRONMENT = """
import os
from dataclasses import replace
from halfbyte.envs import make_env


def sevens(*, response, **_):
    return response.count("7") / 8


class Faulty:
    name, multi_turn = "faulty", False

    def __init__(self):
        self.inner = make_env("arithmetic:sort", reward="rank_env:sevens")
        self.fault = os.environ.get("FAULT") if os.environ.get("RANK") == os.environ.get("FAULT_RANK") else None
        self.start = self.inner.start
        self.size = self.inner.size

    def prompt(self, split, index):
        found = self.inner.prompt(split, index)
        if split == "train" and index >= 18:
            if self.fault == "asked":
                raise RuntimeError("the well is poisoned")
            if self.fault == "played":
                return replace(found, text=found.text * 20)
        return found
"""


def config_file(policy: Path, out: Path, **sets: Any) -> Path:
    sets = {"learner__schedule": "constant", "train__steps": STEPS, "train__checkpoint_every": 2} | sets
    sets = {"env__name": "python:rank_env:Faulty", "learner__rank_timeout": 300.0} | sets
    path = out.with_suffix(".json")
    path.write_text(json.dumps(small_config(policy, out, **sets).to_json()))
    return path


def train(ranks: int, folder: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return torchrun(ranks, "-m", "halfbyte", "train", *arguments, folder=folder, **extra)


def rows(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in RunFolder(out).rows()]


def stored(out: Path, what: str) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(out / "checkpoints")
    assert path is not None
    return dict(open_tensors(path, what))


#: Counts of what was sampled, scored and published: equal even where sums differ in their last bits.
EXACT = ("reward/", "length/", "finish/", "tokens/", "version", "accuracy/", "eval/", "learner/samples", "step", "kind")


def assert_alike(a: Path, b: Path, tolerance: float) -> None:
    """The same steps; tokens, rewards and versions equal, numbers and weights within ``tolerance`` (0: to the bit)."""
    left, right = rows(a), rows(b)
    assert [r.keys() for r in left] == [r.keys() for r in right]
    for one, two in zip(left, right):
        for name, value in one.items():
            if tolerance == 0 or name.startswith(EXACT):
                assert two[name] == value, (one["step"], name)
            elif not name.startswith("refit/"):  # a weight at the border of two BF16 values
                assert two[name] == pytest.approx(value, rel=1e-4, abs=tolerance), (one["step"], name)
    for what in ("masters", "optimiser"):
        one_state, two_state = stored(a, what), stored(b, what)
        assert one_state.keys() == two_state.keys()
        for name, tensor in one_state.items():
            assert float((tensor - two_state[name]).abs().max()) <= tolerance, name


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the environment's module."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "rank_env.py").write_text(ENVIRONMENT)
    return str(folder)


@pytest.fixture(scope="module")
def two_ranks(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory, faulty: str) -> Path:
    out = tmp_path_factory.mktemp("fsdp") / "two"
    done = train(2, faulty, "--config", str(config_file(policy_folder, out)))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("report:") == 1, "one rank speaks"
    assert done.stderr.count("held-out accuracy after") == 1
    return out


@pytest.fixture(scope="module")
def one_process(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory, faulty: str) -> Path:
    out = tmp_path_factory.mktemp("fsdp") / "one"
    code = (
        "import json, sys, torch\n"
        "from halfbyte.config import Config\n"
        "from halfbyte.train import run\n"
        "run(Config.from_json(json.load(open(sys.argv[1]))))\n"
        "assert not torch.distributed.is_initialized()\n"
        "names = ('torch.distributed.checkpoint', 'halfbyte.learner.sharded',\n"
        "         'halfbyte.train.distributed', 'halfbyte.train.sharded_weights', 'halfbyte.train.rank_rollouts',\n"
        "         'halfbyte.train.led_rollouts')\n"
        "sys.exit(', '.join(m for m in sys.modules if m.startswith(names)) or 0)\n"
    )
    config = config_file(policy_folder, out)
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)], env=environment(faulty), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"one process needs nothing of what several use: {done.stderr[-2000:]}"
    return out


def test_two_ranks_train_as_one_process(two_ranks: Path, one_process: Path) -> None:
    assert_alike(one_process, two_ranks, 1e-5)
    versions = [row["version"] for row in rows(two_ranks) if row["kind"] == "train"]
    assert versions == [1.0, 2.0, 3.0, 4.0], "one version a step"
    report = verify_store(FilesystemStore(two_ranks / "refit"))
    assert report.good
    assert sorted({way.edge.version for way in report.ways}) == [0, 1, 2, 3, 4]


def back_at(source: Path, to: Path, step: int) -> Path:
    """A copy of a run as it was when a kill came after ``step``."""
    shutil.copytree(source, to)
    for path in (to / "checkpoints").iterdir():
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    for name in ("summary.json", "report.html"):
        (to / name).unlink(missing_ok=True)
    shutil.rmtree(to / "model")
    return to


def test_resume_on_as_many_ranks_is_the_same_to_the_bit(two_ranks: Path, tmp_path: Path, faulty: str) -> None:
    out = back_at(two_ranks, tmp_path / "run", 2)
    done = train(2, faulty, "--out", str(out), "--resume")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_alike(two_ranks, out, 0.0)
    assert (out / "model" / "model.safetensors").read_bytes() == (
        two_ranks / "model" / "model.safetensors"
    ).read_bytes()


def resumed_alone(out: Path) -> Config:
    data = json.loads((out / "config.json").read_text())
    return Config.from_json(data | {"train": data["train"] | {"out": str(out)}})


def test_resume_in_one_process(two_ranks: Path, tmp_path: Path, faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(faulty)
    out = back_at(two_ranks, tmp_path / "run", 2)
    assert run(resumed_alone(out), resume=True) == 0
    assert_alike(two_ranks, out, 1e-6)


@pytest.mark.slow
def test_two_ranks_then_one_then_three(two_ranks: Path, tmp_path: Path, faulty: str) -> None:
    out = back_at(two_ranks, tmp_path / "run", 2)
    for ranks, steps in ((1, 3), (3, 4)):
        done = train(ranks, faulty, "--out", str(out), "--resume", "--steps", str(steps))
        assert done.returncode == 0, done.stderr[-4000:]
        assert latest_checkpoint(out / "checkpoints") == out / "checkpoints" / f"step_{steps:06d}"
    for row in (written := RunFolder(out).rows()):
        if row["kind"] == "eval" and row["step"] == 3:
            written.remove(row)  # the run of three steps ended with an evaluation
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    assert_alike(two_ranks, out, 1e-6)
    assert len(list((latest_checkpoint(out / "checkpoints") / "masters").iterdir())) == 3  # type: ignore[operator]


def test_a_checkpoint_without_one_of_its_shards_is_refused(
    two_ranks: Path, tmp_path: Path, faulty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(faulty)
    out = back_at(two_ranks, tmp_path / "run", 2)
    for lost in (out / "checkpoints" / "step_000002" / "masters").glob("shard-00001-*"):
        lost.unlink()
    with pytest.raises(CheckpointError, match=r"leave a hole|missing"):
        run(resumed_alone(out), resume=True)


def messages(text: str) -> list[str]:
    """Errors that halfbyte printed."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("where", ["played", pytest.param("asked", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_error_of_one_rank_ends_all_with_one_message(
    where: str, rank: int, policy_folder: Path, two_ranks: Path, tmp_path: Path, faulty: str
) -> None:
    """``played``: a prompt of its share is too long, which all hear; ``asked``: elsewhere, while the other waits for it."""
    out = tmp_path / "run"
    config = str(config_file(policy_folder, out))
    done = train(2, faulty, "--config", config, FAULT=where, FAULT_RANK=str(rank))
    assert done.returncode != 0
    (message,) = messages(done.stderr)
    assert message.startswith({"played": "error: a prompt of ", "asked": "error: the environment fails"}[where])
    assert f"rank {rank} of 2" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1 + (where == "asked"), (
        "torchrun's, and the environment's"
    )
    saved = latest_checkpoint(out / "checkpoints")
    assert saved is not None
    assert saved.name == {"played": "step_000003", "asked": "step_000002"}[where], "what all know, all can save"
    if where == "played":
        return
    done = train(2, faulty, "--out", str(out), "--resume")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_alike(two_ranks, out, 0.0)


def workers(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The ranks that a launcher has started."""
    found = {}
    for process in psutil.Process(launcher.pid).children():
        try:
            found[int(process.environ()["RANK"])] = process
        except (KeyError, psutil.Error):
            continue
    return found


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_ends_all_in_bounded_time(
    number: signal.Signals, rank: int, policy_folder: Path, two_ranks: Path, tmp_path: Path, faulty: str
) -> None:
    out = tmp_path / "run"
    config = str(config_file(policy_folder, out, learner__rank_timeout=15.0))
    launcher = subprocess.Popen(
        command(2, "-m", "halfbyte", "train", "--config", config),
        env=environment(faulty),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    end = time.monotonic() + 600
    while len(RunFolder(out).rows()) < 4:  # the evaluation and three steps: there is a checkpoint
        assert time.monotonic() < end
        assert launcher.poll() is None
        time.sleep(0.005)
    held = workers(launcher)
    os.kill(held[rank].pid, number)
    _, text = launcher.communicate(timeout=600)
    assert not [process for process in held.values() if process.is_running()], "no rank is left behind"
    if (out / "summary.json").exists():
        pytest.skip("finished before the signal")
    assert launcher.returncode != 0
    assert messages(text) == ["error: another rank of this run is gone"]
    done = train(2, faulty, "--out", str(out), "--resume", "--set", "learner.rank_timeout=300")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_alike(two_ranks, out, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_finishes_the_step_and_saves(
    number: signal.Signals, policy_folder: Path, two_ranks: Path, tmp_path: Path, faulty: str
) -> None:
    """Steps 1 to 4, with a stop wherever it comes."""
    out = tmp_path / "run"
    config = str(config_file(policy_folder, out, train__checkpoint_every=0))
    launcher = subprocess.Popen(
        command(2, "-m", "halfbyte", "train", "--config", config),
        env=environment(faulty),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 600
    while len(RunFolder(out).rows()) < 2:
        assert time.monotonic() < end
        assert launcher.poll() is None
        time.sleep(0.005)
    os.kill(launcher.pid, number)
    _, text = launcher.communicate(timeout=600)
    assert messages(text) == []
    assert latest_checkpoint(out / "checkpoints") is not None
    done = train(2, faulty, "--out", str(out), "--resume", "--set", "train.checkpoint_every=2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_alike(two_ranks, out, 0.0)


@pytest.mark.slow
def test_wrong_configuration_is_said_once(policy_folder: Path, tmp_path: Path, faulty: str) -> None:
    config = str(config_file(policy_folder, tmp_path / "run"))
    done = train(2, faulty, "--config", config, "--set", "learner.execution=native")
    assert done.returncode != 0
    assert messages(done.stderr) == ["error: learner.execution = native on several ranks"]
    assert not (tmp_path / "run").exists()


BESIDE: dict[str, dict[str, Any]] = {
    "background": {"rollout__overlap": True, "rollout__staleness": 2},
    "ray": {"rollout__backend": "ray", "rollout__workers": 1, "rollout__overlap": True, "rollout__staleness": 1},
    "groups": {"rollout__overlap": True, "rollout__staleness": 2, "rollout__partial": True, "rollout__in_flight": True},
}


@pytest.mark.parametrize("backend", ["background", pytest.param("ray", marks=pytest.mark.slow)])
def test_rollouts_that_rank_0_leads_give_what_one_process_gets(
    backend: str, policy_folder: Path, tmp_path: Path, faulty: str
) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    alone, two = tmp_path / "alone", tmp_path / "two"
    for ranks, out in ((1, alone), (2, two)):
        done = train(ranks, faulty, "--config", str(config_file(policy_folder, out, **BESIDE[backend])))
        assert done.returncode == 0, done.stderr[-4000:]
    assert_alike(alone, two, 1e-5)
    assert verify_store(FilesystemStore(two / "refit")).good
    again = back_at(two, tmp_path / "again", 2)  # what was in flight is in the checkpoint
    done = train(2, faulty, "--out", str(again), "--resume")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_alike(two, again, 0.0)


@pytest.mark.slow
def test_groups_as_they_get_ready_are_the_same_on_all_ranks(policy_folder: Path, tmp_path: Path, faulty: str) -> None:
    done = train(2, faulty, "--config", str(config_file(policy_folder, tmp_path / "two", **BESIDE["groups"])))
    assert done.returncode == 0, done.stderr[-4000:]
    trained = [row for row in rows(tmp_path / "two") if row["kind"] == "train"]
    assert [row["flight/taken"] for row in trained] == [6.0, 12.0, 18.0, 24.0]


@pytest.mark.slow
def test_an_error_of_the_backend_that_rank_0_leads_is_said_once(
    policy_folder: Path, tmp_path: Path, faulty: str
) -> None:
    config = str(config_file(policy_folder, tmp_path / "run", **BESIDE["background"]))
    done = train(2, faulty, "--config", config, FAULT="played", FAULT_RANK="0")
    assert done.returncode != 0
    assert [m[:18] for m in messages(done.stderr)] == ["error: a prompt of"], done.stderr[-5000:]
    assert "rank 0 of 2" in done.stderr
