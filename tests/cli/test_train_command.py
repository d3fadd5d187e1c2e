"""What ``halfbyte train`` and ``halfbyte generate`` hand on: flags, ``--set``, resuming, exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from halfbyte.cli.main import main
from halfbyte.config import Config


class Calls(list[dict[str, Any]]):
    """Calls of a stand-in for the loop, and what it answers."""

    code = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """``halfbyte.train`` and ``halfbyte.rollout.generate`` replaced by recorders: these tests are about the surface."""
    recorded = Calls()

    def run(config: Config, *, resume: bool, overwrite: bool, ray_address: str | None) -> int:
        recorded.append({"config": config, "resume": resume, "overwrite": overwrite})
        folder = Path(config.train.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_json()))
        (folder / "metrics.jsonl").write_text("")
        return recorded.code

    def generate_file(*arguments: object, **named: object) -> int:
        recorded.append({"arguments": arguments, **named})
        return 7

    for name, function in (("halfbyte.train", run), ("halfbyte.rollout.generate", generate_file)):
        module = ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return recorded


def test_flags_beat_the_file_and_settings_beat_flags(tmp_path: Path, calls: Calls) -> None:
    file = tmp_path / "run.toml"
    file.write_text('precision = "bf16"\n[train]\nsteps = 7\nseed = 3\n[learner]\nlr = 1e-3\n')
    out = str(tmp_path / "out")
    arguments = [
        "train",
        "--config",
        str(file),
        "--steps",
        "9",
        "--out",
        out,
        "--env",
        "arithmetic:add",
        "--model",
        "m",
    ]
    assert main([*arguments, "--set", "learner.lr=1e-5", "--set", "rollout.stop=['a', 'b']"]) == 0
    (call,) = calls
    config = call["config"]
    assert (config.train.steps, config.train.seed, config.train.out) == (9, 3, out)
    assert (config.precision, config.learner.lr, config.rollout.stop) == ("bf16", 1e-5, ("a", "b"))
    assert (config.env.name, config.model.path) == ("arithmetic:add", "m")
    assert (call["resume"], call["overwrite"]) == (False, False)


def test_a_finished_run_gets_its_report(tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "r"), "--overwrite"]) == 0
    assert calls[0]["overwrite"] is True
    assert (tmp_path / "r" / "report.html").is_file()
    assert capsys.readouterr().out == f"report: {tmp_path / 'r' / 'report.html'}\n"


def test_a_stopped_run_gets_its_report_too(tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.code = 130
    assert main(["train", "--out", str(tmp_path / "r")]) == 130
    assert (tmp_path / "r" / "report.html").is_file()
    assert "--resume" in capsys.readouterr().out


def test_resume_takes_the_configuration_of_the_run(tmp_path: Path, calls: Calls) -> None:
    out = str(tmp_path / "r")
    assert main(["train", "--out", out, "--seed", "5", "--set", "learner.lr=1e-5"]) == 0
    assert main(["train", "--out", out, "--resume", "--steps", "400"]) == 0
    first, second = calls[0]["config"], calls[1]["config"]
    assert calls[1]["resume"] is True
    assert (second.train.seed, second.learner.lr, second.train.steps) == (5, 1e-5, 400)
    assert second.model_copy(update={"train": first.train}) == first


def test_resume_with_a_file_uses_the_file(tmp_path: Path, calls: Calls) -> None:
    out, file = str(tmp_path / "r"), tmp_path / "run.toml"
    file.write_text("[train]\nseed = 8\n")
    assert main(["train", "--out", out, "--seed", "5"]) == 0
    assert main(["train", "--out", out, "--resume", "--config", str(file)]) == 0
    assert calls[1]["config"].train.seed == 8  # the loop refuses it, naming the key


def test_threads_reach_the_environment_before_the_loop(tmp_path: Path, calls: Calls) -> None:
    assert main(["train", "--out", str(tmp_path / "r"), "--threads", "1"]) == 0
    assert os.environ["HALFBYTE_THREADS"] == os.environ["OMP_NUM_THREADS"] == "1"
    assert calls[0]["config"].train.threads == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "learner.lrr=1"], ["learner.lrr", "learner.lr"]),
        (["--set", "nonsense"], ["nonsense"]),
        (["--steps", "0"], ["train.steps"]),
        (["--config", "none.toml"], ["none.toml"]),
        (["--threads", "0"], ["threads"]),
    ],
)
def test_wrong_values_are_user_errors(
    arguments: list[str], words: list[str], calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    assert calls == []
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for word in words:
        assert word in error


def test_generate_hands_every_flag_on(tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--model m --input a.jsonl --output b.jsonl --precision bf16 --max-tokens 5 --temperature 0.5 --top-p 0.9"
    )
    arguments += " --top-k 4 --min-p 0.1 --seed 3 --n 2 --stop x --stop y --logprobs"
    assert main(["generate", *arguments.split()]) == 0
    (call,) = calls
    assert call == {
        "arguments": ("m", Path("a.jsonl"), Path("b.jsonl")),
        "precision": "bf16",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 3,
        "n": 2,
        "stop": ("x", "y"),
        "logprobs": True,
    }
    assert capsys.readouterr().out == "7 responses: b.jsonl\n"
