"""The demo's own promise, over seeds: the policy gets better by reinforcement learning in FP4, and not without a signal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from halfbyte.config import load_config
from halfbyte.models.trajectory import Trajectory
from halfbyte.train import run
from halfbyte.train.rollouts import LocalRollouts
from halfbyte.train.run_folder import RunFolder

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.toml"


def summary(out: Path, *sets: str) -> dict[str, float]:
    config = load_config(DEMO, sets, {"train.out": out})
    assert run(config) == 0
    found: dict[str, float] = json.loads((out / "summary.json").read_text())
    print(json.dumps(found), file=sys.stderr)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_gains_at_least_20_points(seed: int, tmp_path: Path) -> None:
    """Issue #2: 20 points for each seed; seed 0 is the demo as shipped and owes 30."""
    got = summary(tmp_path / "run", f"train.seed={seed}", "eval.every=0")
    assert got["accuracy_before"] < 0.55, "the packaged policy leaves room"
    gain = got["accuracy_after"] - got["accuracy_before"]
    assert gain >= (0.30 if seed == 0 else 0.20)
    assert got["k3_kl"] < 0.01


@pytest.mark.slow
def test_two_updates_behind_it_still_learns(tmp_path: Path) -> None:
    """Issue #9: partial rollouts beside the learner, k = 2, at a third of the demo's rate, on a third of its prompts."""
    sets = "rollout.prompts_per_step=24 learner.schedule=constant learner.lr=1e-4 objective.correction=token_tis "
    sets += "rollout.staleness=2 rollout.overlap=true rollout.in_flight=true rollout.partial=true"
    got = summary(tmp_path / "run", *sets.split(), "train.steps=40", "train.threads=1", "eval.every=0")
    assert got["accuracy_after"] > got["accuracy_before"] + 0.08
    rows = [row for row in RunFolder(tmp_path / "run").rows() if row["kind"] == "train"]
    assert max(row["stale/max"] for row in rows) == 2
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.04


@pytest.mark.slow
def test_shuffled_rewards_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the same run with rewards handed to the wrong samples of their group gains less than 10 points."""
    real = LocalRollouts.take

    def shuffled(self: LocalRollouts, number: int) -> list[Trajectory]:
        out = real(self, number)
        for group in {t.group for t in out}:
            members = [t for t in out if t.group == group]
            rewards = [t.reward for t in members]
            for t, reward in zip(members, rewards[3:] + rewards[:3]):
                t.reward = reward
        return out

    monkeypatch.setattr(LocalRollouts, "take", shuffled)
    got = summary(tmp_path / "run", "train.steps=100", "eval.every=0")
    assert got["accuracy_after"] - got["accuracy_before"] < 0.10
