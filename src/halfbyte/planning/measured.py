"""Rates and sizes that a run folder has measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from halfbyte.errors import DataError

__all__ = ["Measured", "measured"]


@dataclass(frozen=True)
class Measured:
    """Medians over the training steps of a run (the first is left out where there are others: it warms up).

    Arguments:
        rollout_rate: generated tokens a second.
        learner_rate: generated tokens a second that the learner trained on.
        change_rate: share of BF16 weights an update changed; None where it was not recorded.
        response_tokens: mean length.
    """

    rollout_rate: float
    learner_rate: float
    change_rate: float | None
    response_tokens: float
    steps: int


def measured(run: Path) -> Measured:
    """What ``metrics.jsonl`` of a run folder says.

    Raises:
        DataError: no such file, or no training steps in it.
    """
    path = run / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError("no metrics to read", where=str(path), expected="a run folder of halfbyte train") from error
    needed = ("tokens/rollout", "time/rollout", "time/learner", "length/mean")
    steps = [row for row in rows if row.get("kind") == "train" and all(row.get(key) for key in needed)]
    steps = steps[1:] or steps
    if not steps:
        raise DataError("no training steps", where=str(path), expected="a run of at least one step")
    changes = [row["refit/changed"] for row in steps if "refit/changed" in row]
    return Measured(
        rollout_rate=median(row["tokens/rollout"] / row["time/rollout"] for row in steps),
        learner_rate=median(row["tokens/rollout"] / row["time/learner"] for row in steps),
        change_rate=median(changes) if changes else None,
        response_tokens=median(row["length/mean"] for row in steps),
        steps=len(steps),
    )
