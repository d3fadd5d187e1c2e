"""What the samples of a step say: rewards, lengths, and how old their tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfbyte.models.trajectory import Trajectory

__all__ = ["ages", "mean", "rollout_metrics"]


def ages(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Updates between drawing a token and training on it, at ``version``."""
    found = np.concatenate([version - t.versions[t.mask] for t in trajectories])
    return {
        "stale/mean": float(found.mean()),
        "stale/max": float(found.max()),
        "stale/tokens": float((found > 0).mean()),
    }


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards, accuracy and lengths of a step's samples."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    average = mean(rewards)
    lengths = [len(t.response_ids) for t in trajectories]
    spread = (
        {"reward/mean": average, "reward/std": mean([(r - average) ** 2 for r in rewards]) ** 0.5} if rewards else {}
    )
    return spread | {
        "reward/failed": float(len(trajectories) - len(rewards)),
        "accuracy/train": mean([float(bool(t.info.get("correct"))) for t in trajectories]),
        "length/mean": mean([float(n) for n in lengths]),
        "length/max": float(max(lengths)),
        "finish/length": mean([float(t.finish_reason == "length") for t in trajectories]),
    }


def mean(values: Sequence[float]) -> float:
    """0 for none."""
    return sum(values) / len(values) if values else 0.0
