"""A random character-level policy with a tokenizer, and a reward that a few steps can raise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.models.checkpoint_writer import save_checkpoint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "make_tiny.py"
REWARD_MODULE = '''
def sevens(*, response, **_):
    """Share of sevens: dense, so that every group has a signal."""
    return response.count("7") / 8


def always_broken(**_):
    raise RuntimeError("the judge is gone")


def sometimes_broken(*, prompt, response, **_):
    if any(c in response for c in "0123"):
        raise RuntimeError("the judge is down")
    if "4" in response:
        return float("nan")
    return response.count("7") / 8
'''


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE of the tiny shape's family, smaller, with the character tokenizer."""
    make_tiny = runpy.run_path(str(EXAMPLE))
    root = tmp_path_factory.mktemp("policy")
    make_tiny["write_tokenizer"](root / "tokenizer")
    from dataclasses import replace

    arch = replace(make_tiny["ARCHITECTURE"], hidden_size=64, head_dim=16, moe_intermediate_size=32, n_experts=4)
    tensors = {k: v * 5 if v.dim() > 1 else v for k, v in make_tiny["initial_tensors"](arch, 0).items()}
    save_checkpoint(root / "model", arch, tensors, tokenizer_from=root / "tokenizer")
    return root / "model"


@pytest.fixture
def reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module of reward functions; its folder is on sys.path and PYTHONPATH."""
    (tmp_path / "rewards_under_test.py").write_text(REWARD_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delitem(sys.modules, "rewards_under_test", raising=False)
    return "rewards_under_test"


@pytest.fixture
def torch_single_thread() -> Any:
    """Fixed thread count: float results depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
