"""A learner on several ranks computes what one process computes: weights to the bit, loss and gradients to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sharded_case
import torch
from torchrun import torchrun

from halfbyte.models.safetensors_io import SafetensorsFile

#: Each is played by one process and by several.
CASES: dict[str, dict[str, Any]] = {
    "moe": {"family": "qwen3_moe", "steps": 2},
    "micro-batches": {"family": "qwen3_moe", "learner": {"max_tokens_per_microbatch": 60}},
    "tied": {"family": "llama", "precision": "w4a4kv4", "learner": {"activation_checkpointing": True}},
    "exact": {"family": "qwen2", "precision": "fp32", "learner": {"packing": False}},
    "phases": {"family": "qwen3_moe", "precision": "experts-w4a4kv4"},
    "hysteretic": {"family": "qwen3", "global_update": "hysteretic", "steps": 2},
    "whole scale": {"family": "qwen3_moe", "weight_spec": "torchao"},
    "several updates": {"family": "qwen3_moe", "learner": {"epochs": 2, "minibatches": 2}},
    "reference": {"family": "qwen3_moe", "objective": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "one sample a rank too few": {"family": "qwen3_moe", "groups": 1, "samples": 2},
}


@pytest.fixture(scope="module")
def single(family_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("single")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for case in cases(family_folders, root):
        sharded_case.play(case)
    torch.set_num_threads(before)
    return root


def cases(folders: dict[str, Path], root: Path) -> list[dict[str, Any]]:
    return [{**c, "checkpoint": str(folders[c["family"]]), "out": str(root / name)} for name, c in CASES.items()]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def several(
    request: pytest.FixtureRequest, family_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp(f"ranks{request.param}")
    (root / "cases.json").write_text(json.dumps(cases(family_folders, root)))
    done = torchrun(request.param, sharded_case.__file__, str(root / "cases.json"))
    assert done.returncode == 0, done.stderr[-4000:]
    return root


@pytest.mark.parametrize("case", CASES)
def test_several_ranks_compute_what_one_process_computes(case: str, single: Path, several: Path) -> None:
    one, many = (dict(SafetensorsFile(root / case / "tensors.safetensors")) for root in (single, several))
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        if name.startswith("start "):
            assert torch.equal(tensor, many[name]), f"{name}: codes of shards are those of the whole"
        elif name.startswith("gradient 0 "):
            scale = float(tensor.abs().max())
            torch.testing.assert_close(many[name], tensor, atol=2e-6 * scale, rtol=2e-6, msg=name)
        elif name in ("logp 0", "entropy 0"):
            torch.testing.assert_close(many[name], tensor, atol=1e-6, rtol=1e-6, msg=name)
    left, right = (json.loads((root / case / "rows.json").read_text()) for root in (single, several))
    assert left["norms"][0] == pytest.approx(right["norms"][0], rel=1e-6)
    assert left["rows"][0].keys() == right["rows"][0].keys()
    for name, value in left["rows"][0].items():
        assert right["rows"][0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
