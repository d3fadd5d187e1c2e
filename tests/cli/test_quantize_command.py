"""``halfbyte quantize`` and what opens its folders: generate, doctor, train; killed at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import small_config

from halfbyte.cli.main import main
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.open_model import model_folder
from halfbyte.quantize.export import quantize_model
from halfbyte.train.run import run


def halfbyte(*words: object) -> int:
    return main([*map(str, words)])


def test_it_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert halfbyte("quantize", "tiny", tmp_path / "fp4", "--format", "modelopt", "--precision", "experts-only") == 0
    out = capsys.readouterr().out
    assert out.startswith("48 weights in FP4, 11 modules left as they are:")
    assert "note         input scales are the constant 0.125" in out
    assert halfbyte("quantize", "tiny", tmp_path / "own", "--format", "halfbyte", "--spec", "mx_even", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["quantised_weights"] == 56
    assert facts["left"] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    assert facts["notes"] == []
    assert 0.05 < facts["relative_error"] < 0.2
    size = sum(path.stat().st_size for path in (tmp_path / "own").glob("*.safetensors"))
    assert facts["bytes_after"] <= size < 1.1 * facts["bytes_after"] < 0.4 * facts["bytes_before"]


def test_user_errors_are_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fp4"
    for words, message in (
        (["nowhere", out], "no model folder"),
        (["tiny", out, "--format", "gguf"], "gguf"),
        (["tiny", out, "--spec", "nvfp4"], "no QuantSpec named"),
        (["tiny", out, "--tensor-parallel", "8"], "columns"),
        (["tiny", out, "--tensor-parallel", "0"], "--tensor-parallel is 0"),
        (["tiny", out, "--calibration", tmp_path / "none.jsonl"], "prompts cannot be read"),
    ):
        assert halfbyte("quantize", *words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
    assert not out.exists()
    assert halfbyte("quantize", "tiny", out) == 0
    assert halfbyte("quantize", "tiny", out) == 2
    assert "not empty" in capsys.readouterr().err
    assert halfbyte("quantize", "tiny", out, "--overwrite", "--format", "halfbyte") == 0
    assert load_checkpoint(out).quantisation.style.name == "halfbyte"  # type: ignore[union-attr]


@pytest.mark.parametrize(("style", "spec"), [("compressed-tensors", "halfbyte"), ("halfbyte", "mx_floor")])
def test_generate_gives_the_tokens_of_the_original(tmp_path: Path, style: str, spec: str) -> None:
    """NVFP4: the engine quantises the original to the same codes. MXFP4: the folder decides the format, whatever the preset."""
    quantize_model("tiny", tmp_path / "fp4", style=style, kind="w4a4", spec_name=spec)  # type: ignore[arg-type]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{i}52="}) + "\n" for i in range(4)))
    found = []
    for model in ("tiny", tmp_path / "fp4"):
        words = ["--model", model, "--input", source, "--output", tmp_path / "out.jsonl", "--max-tokens", 6]
        assert halfbyte("generate", *words, "--logprobs") == 0
        found.append([json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()])
    assert (found[0] == found[1]) == (spec == "halfbyte")
    assert all(line["tokens"] for line in found[1])


def test_doctor_opens_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize_model("tiny", tmp_path / "fp4", style="modelopt", kind="w4a4")
    assert halfbyte("doctor", tmp_path / "fp4", "--json") == 0
    fp4 = json.loads(capsys.readouterr().out)["model"]
    assert halfbyte("doctor", "tiny", "--json") == 0
    plain = json.loads(capsys.readouterr().out)["model"]
    assert {**fp4, "folder": ""} == {**plain, "folder": ""}


def test_training_starts_from_it(tmp_path: Path) -> None:
    """The learner's masters are the values of the codes; NVFP4 training of a W4A4 model sees the same weights at step 0."""
    quantize_model("tiny", tmp_path / "fp4", style="compressed-tensors", kind="w4a4")
    runs = []
    for name, policy in (("a", model_folder("tiny")), ("b", tmp_path / "fp4")):
        run(small_config(policy, tmp_path / name, train__steps=1))
        runs.append([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
    first, second = (next(row for row in rows if "reward/mean" in row) for rows in runs)
    assert first["reward/mean"] == second["reward/mean"]


@pytest.mark.slow
def test_killed_at_any_time_it_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    out = tmp_path / "fp4"
    quantize_model("tiny", out, style="modelopt", kind="w4a4")
    old = {path.name: path.read_bytes() for path in out.iterdir()}
    command = [sys.executable, "-m", "halfbyte", "quantize", "tiny", str(out), "--overwrite", "--format", "halfbyte"]
    started = time.monotonic()
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": "src"}, capture_output=True)
    whole = time.monotonic() - started
    new = {path.name: path.read_bytes() for path in out.iterdir()}
    seen = set()
    for i in range(8):
        quantize_model("tiny", out, style="modelopt", kind="w4a4", overwrite=True)
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": "src"}, stdout=subprocess.DEVNULL)
        time.sleep(whole * (0.5 + 0.08 * i))
        process.send_signal(signal.SIGKILL)
        process.wait()
        present = {path.name: path.read_bytes() for path in out.iterdir()}
        assert present in (old, new)
        seen.add(present == new)
    assert False in seen
