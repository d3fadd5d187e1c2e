"""The configuration of a run of a few seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfbyte.config import Config, load_config


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
