"""Staleness as the axis of a study: arms are compared under each value."""

from __future__ import annotations

from pathlib import Path

import torch

from halfbyte.study import worker
from halfbyte.study.plan import load_plan
from halfbyte.study.schedule import _command, results

TEXT = """
[study]
name = "late"
arms = ["fp4-naive", "qat+tis"]
reference = "qat+tis"
seeds = [0]
deployed = ["w4a4kv4"]
[base.rollout]
prompts_per_step = 2
samples_per_prompt = 4
kv_memory_mb = 4.0
[base.env]
max_prompt_tokens = 32
[base.eval]
prompts = 8
[base.train]
steps = 2
checkpoint_every = 1
[base.learner]
schedule = "constant"
lr = 3e-3
[axes]
"rollout.staleness" = [0, 1]
"""


def test_arms_are_compared_under_every_staleness(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (tmp_path / "study.toml").write_text(TEXT)
        plan = load_plan(tmp_path / "study.toml", out=tmp_path / "out")
        jobs = plan.jobs()
        assert sorted((job.arm, job.config.rollout.staleness) for job in jobs) == sorted(
            (arm, k) for arm in ("fp4-naive", "qat+tis") for k in (0, 1)
        )
        for job in jobs:
            _command(job, plan)
            assert worker.work(job.folder) == 0
        found = results(plan)
    finally:
        torch.set_num_threads(before)
    assert found["complete"]
    assert [group["name"] for group in found["groups"]] == [
        "late, rollout.staleness = 0",
        "late, rollout.staleness = 1",
    ]
    for group, staleness in zip(found["groups"], (None, 0.5)):
        assert [row["arm"] for row in group["arms"]] == ["fp4-naive", "qat+tis"]
        assert not group["differing_settings"]
        runs = [run for run in found["runs"] if run["group"] == group["name"]]
        assert [run["metrics"].get("stale/mean") for run in runs] == [staleness] * 2, (
            "0 and 1 update, where there is any"
        )
