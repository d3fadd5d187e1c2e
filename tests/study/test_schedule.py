"""A study killed anywhere goes on without repeating a finished run, and ends with the same results."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from study_case import KilledError, PretendPool

from halfbyte.errors import ConfigError
from halfbyte.study.plan import Plan, load_plan
from halfbyte.study.schedule import Outcome, run_study

TEXT = '[study]\nname = "s"\nout = "{out}"\narms = ["bf16", "qat", "post-hoc"]\nseeds = {seeds}\n[base.train]\nsteps = {steps}\n'


def plan_of(folder: Path, seeds: str = "[0, 1]", steps: int = 3, extra: str = "") -> Plan:
    path = folder / "study.toml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(TEXT.format(out=folder / "out", seeds=seeds, steps=steps) + extra)
    return load_plan(path)


def study(plan: Plan, pool: PretendPool, looks: list[dict[str, Any]] | None = None) -> Outcome:
    return run_study(plan, say=lambda text: None, publish=(looks if looks is not None else []).append, pool=pool)


def test_killed_at_every_event_it_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    whole = PretendPool()
    looks: list[dict[str, Any]] = []
    assert study(plan_of(tmp_path / "whole"), whole, looks).complete
    assert len(whole.trained) == 4
    assert [look["finished"] for look in looks] == [0, 1, 2, 3, 4, 4]
    for moment in range(whole.events):
        plan = plan_of(tmp_path / f"k{moment}")
        first, second, found = PretendPool(die_at=moment), PretendPool(), []
        with pytest.raises(KilledError):
            study(plan, first)
        finished = [f for f in first.trained if (plan.folder / "runs" / f / "deployed.json").exists()]
        assert study(plan, second, found).complete
        assert not set(finished) & set(second.trained), moment
        assert sorted(set(first.trained) | set(second.trained)) == sorted(whole.trained)
        assert json.dumps(found[-1], sort_keys=True) == json.dumps(looks[-1], sort_keys=True), moment
    third = PretendPool()
    assert study(plan_of(tmp_path / "whole"), third).complete
    assert third.events == 0


def test_killed_over_and_over_it_still_ends(tmp_path: Path) -> None:
    plan, trained = plan_of(tmp_path), []
    for _ in range(40):
        pool = PretendPool(die_at=4)
        try:
            outcome = study(plan, pool)
        except KilledError:
            trained += pool.trained
            continue
        assert outcome.complete
        break
    else:
        pytest.fail("it never ended")
    assert len(trained + pool.trained) == len(set(trained + pool.trained)) == 4


def test_a_failed_run_is_named_leaves_the_others_alone_and_is_tried_again(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    outcome = study(plan, PretendPool(fail=["qat/seed_1"]))
    assert (outcome.complete, list(outcome.failed)) == (False, ["qat seed 1"])
    assert "no luck" in outcome.failed["qat seed 1"]
    again = PretendPool()
    assert study(plan, again).complete
    assert again.trained == ["qat/seed_1"]


def test_a_broken_run_is_finished(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, seeds="[0]")
    study(plan, PretendPool(fail=["qat"]))
    folder = plan.folder / "runs" / "qat" / "seed_0"
    (folder / "outcome.json").write_text('{"outcome": "broken", "message": "a weight is NaN"}')
    (folder / "metrics.jsonl").write_text('{"step": 0, "kind": "eval", "eval/accuracy": 0.4}\n')
    (folder / "config.json").write_text(json.dumps(plan.jobs()[1].config.to_json()))
    pool, looks = PretendPool(), []
    assert study(plan, pool, looks).complete
    assert pool.trained == []
    assert [run["status"] for run in looks[-1]["runs"]] == ["finished", "broken"]


def test_more_seeds_may_follow_and_it_is_on_record(tmp_path: Path) -> None:
    study(plan_of(tmp_path, seeds="[0]"), PretendPool())
    pool, looks = PretendPool(), []
    study(plan_of(tmp_path, seeds="[0, 1]"), pool, looks)
    assert pool.trained == ["bf16/seed_1", "qat/seed_1"]
    assert [entry["finished_runs"] for entry in looks[-1]["history"]] == [0, 2]
    assert looks[-1]["history"][0]["plan"]["study"]["seeds"] == [0]


def test_another_precision_to_serve_needs_no_training(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, seeds="[0]")
    study(plan, PretendPool())
    text = (tmp_path / "study.toml").read_text().replace("seeds", 'deployed = ["bf16", "w4a4kv4", "w4a16"]\nseeds')
    (tmp_path / "study.toml").write_text(text)
    pool, looks = PretendPool(), []
    assert study(load_plan(tmp_path / "study.toml"), pool, looks).complete
    assert pool.trained == []
    assert set(looks[-1]["runs"][0]["deployed"]) == {"bf16", "w4a4kv4", "w4a16"}


def test_runs_of_another_configuration_are_not_mixed_in(tmp_path: Path) -> None:
    study(plan_of(tmp_path), PretendPool())
    pool = PretendPool()
    with pytest.raises(ConfigError, match=r"bf16 seed 0.*train.steps: 3 -> 4"):
        study(plan_of(tmp_path, steps=4), pool)
    assert pool.events == 0


def test_one_process_at_a_time_runs_a_study(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    plan.folder.mkdir()
    with (plan.folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process"):
            study(plan, PretendPool())
