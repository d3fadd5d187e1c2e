"""Runs with workers on Ray beside the same runs in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from small_run import small_config

from halfbyte.config import Config


def run_config(out: Path, workers: int = 0, **sets: Any) -> Config:
    """A few steps of the shipped policy, quick and with a signal; 0 workers play in this process."""
    base: dict[str, Any] = {"rollout__max_tokens": 16, "learner__lr": 3e-4, "train__save_trajectories_every": 1}
    if workers:
        base |= {"rollout__backend": "ray", "rollout__workers": workers, "alignment__memory_mb": 32.0}
    return small_config(Path("tiny"), out, **{**base, **sets})


def numbers(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what a clock says."""
    rows = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(row).items() if not k.startswith("time/")} for row in rows]


def assert_same_run(one: Path, other: Path, *, learns: bool = True) -> None:
    """Metrics, sampled trajectories and final weights are equal bit for bit; something was learnt, and shipped to workers."""
    rows = numbers(one)
    assert rows == numbers(other)
    assert any(row.get("refit/changed", 0) > 0 for row in rows) or not learns
    for folder in ("trajectories", "model"):
        names = sorted(p.name for p in (one / folder).iterdir())
        assert names == sorted(p.name for p in (other / folder).iterdir())
        for name in names:
            assert (one / folder / name).read_bytes() == (other / folder / name).read_bytes(), f"{folder}/{name}"
