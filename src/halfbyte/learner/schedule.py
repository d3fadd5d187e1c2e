"""Learning-rate schedules: a factor in [0, 1] for every training step."""

from __future__ import annotations

import math

from halfbyte.errors import ConfigError

__all__ = ["rate_factor"]


def rate_factor(schedule: str, step: int, *, warmup: int, total: int) -> float:
    """Factor of the peak rate at ``step`` (0-based): linear warm-up, then ``constant``, ``linear`` to 0 or ``cosine`` to 0.

    Raises:
        ConfigError: an unknown schedule.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ConfigError(f"unknown schedule {schedule!r}", where="learner.schedule", expected="constant, linear or cosine")
