"""Runs of a few seconds: their configuration, in a process of their own, and whether two are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from halfbyte.config import Config, load_config
from halfbyte.models.safetensors_io import SafetensorsFile
from halfbyte.train.run_folder import RunFolder
from halfbyte.train.state import latest_checkpoint


def small_config(policy: Path, out: Path, reward: str | None = None, **sets: Any) -> Config:
    """Four small steps; ``sets`` are dotted keys with ``__`` for the dot."""
    base = {
        "model.path": str(policy),
        "train.out": str(out),
        "train.steps": 4,
        "train.checkpoint_every": 1,
        "train.save_trajectories_every": 2,
        "rollout.prompts_per_step": 6,
        "rollout.samples_per_prompt": 4,
        "rollout.max_tokens": 8,
        "rollout.kv_memory_mb": 4.0,
        "env.max_prompt_tokens": 32,
        "eval.prompts": 8,
        "learner.lr": 3e-3,
    }
    if reward is not None:
        base["env.reward"] = reward
    base |= {key.replace("__", "."): value for key, value in sets.items()}
    return load_config(flags=base)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows without times."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in RunFolder(folder).rows()]


def masters(folder: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    return dict(SafetensorsFile(path / "masters.safetensors"))


def assert_same_run(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    left, right = masters(a), masters(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)
    assert (a / "model" / "model.safetensors").read_bytes() == (b / "model" / "model.safetensors").read_bytes()


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from halfbyte.config import Config
import json
from halfbyte.train import run
sys.exit(run(Config.from_json(json.load(open(sys.argv[1]))), resume=sys.argv[2] == "resume"))
"""


def spawn(config: Path, mode: str) -> subprocess.Popen[bytes]:
    source = str(Path(__file__).resolve().parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(config), mode], env=env, stderr=subprocess.DEVNULL)
