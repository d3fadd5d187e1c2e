"""``halfbyte plan`` against a run of the shipped policy, real packed weights, and the published sizes of two large models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_config

from halfbyte.cli.main import main
from halfbyte.errors import ConfigError, DataError
from halfbyte.kernels import active
from halfbyte.models import load_checkpoint
from halfbyte.models.open_model import model_folder
from halfbyte.models.precision import PRESETS
from halfbyte.planning.footprint import open_architecture
from halfbyte.planning.measured import measured
from halfbyte.planning.run_plan import Fleet, RunPlan, Workload, plan_run
from halfbyte.rollout.weights import RolloutWeights

PLANS = Path(__file__).parents[2] / "examples" / "plan"
TINY = model_folder("tiny")


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of the shipped policy at a learning rate that changes a tenth of the weights."""
    from halfbyte.train.run import run

    out = tmp_path_factory.mktemp("plan") / "run"
    sets: dict[str, Any] = {
        "env__name": "arithmetic:sort",
        "rollout__prompts_per_step": 8,
        "rollout__samples_per_prompt": 8,
        "rollout__max_tokens": 16,
        "learner__lr": 1e-5,
        "learner__warmup_steps": 0,
        "learner__schedule": "constant",
        "train__steps": 3,
        "precision": "w4a4kv4",
    }
    assert run(small_config(TINY, out, **sets)) == 0
    return out


def steps(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def tiny_plan(**work: Any) -> RunPlan:
    return plan_run(open_architecture(TINY), Fleet(), Workload(**work))


def test_guidance_bytes_are_those_of_a_run(demo_run: Path) -> None:
    found = tiny_plan()
    assert [row["align/bytes_per_token"] for row in steps(demo_run)] == [found.guidance_bytes_per_token] * 3


def test_full_refit_bytes_are_those_of_a_run(demo_run: Path) -> None:
    """The checkpoint's BF16 weights, to the byte: 2 a parameter."""
    assert {row["refit/full_bytes"] for row in steps(demo_run)} == {tiny_plan().refit.full_bytes}


def test_delta_bytes_are_near_those_of_a_run(demo_run: Path) -> None:
    """At each step's own change rate, within 15%: the fit is to synthetic changes (docs/plan.md has the figures)."""
    for row in steps(demo_run):
        predicted = tiny_plan(change_rate=row["refit/changed"]).refit.delta_bytes
        assert predicted == pytest.approx(row["refit/bytes"], rel=0.15)


def test_weight_bytes_are_those_of_the_engine() -> None:
    """Padding of small matrices apart (5%, as ``halfbyte doctor``'s figures)."""
    checkpoint = load_checkpoint(TINY)
    tensors = dict(checkpoint.tensors)
    rows = {row.precision: row for row in tiny_plan().precisions}
    for name in ("bf16", "w4a4kv4"):
        packed = RolloutWeights.pack(
            checkpoint.architecture, PRESETS[name], tensors, active(), version=0, n_positions=16
        )
        assert rows[name].weight_bytes == pytest.approx(packed.nbytes, rel=0.05)


def test_learner_bytes_are_those_of_its_tensors() -> None:
    """20 bytes a parameter: what FP32 masters, their rounded copy, gradients and AdamW's two moments hold."""
    parameters = [t.float() for t in load_checkpoint(TINY).tensors.values()]
    held = 5 * sum(torch.empty_like(t).nbytes for t in parameters)
    assert tiny_plan().learner_bytes == held


def test_rates_of_a_run(demo_run: Path) -> None:
    seen, rows = measured(demo_run), steps(demo_run)[1:]
    assert seen.steps == 2
    low, high = sorted(row["tokens/rollout"] / row["time/rollout"] for row in rows)
    assert low <= seen.rollout_rate <= high
    plan = tiny_plan(prompts=8, rollout_rate=seen.rollout_rate, learner_rate=seen.learner_rate)
    assert plan.step_seconds is not None
    assert plan.rollout_seconds is not None
    assert plan.learner_seconds is not None
    assert plan.rollout_share == plan.rollout_seconds / plan.step_seconds
    assert plan.step_seconds == plan.rollout_seconds + plan.learner_seconds + plan.refit.delta_total


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metrics"):
        measured(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval"}\n')
    with pytest.raises(DataError, match="no training steps"):
        measured(tmp_path)


def test_qwen3_30b_a3b_has_its_published_sizes() -> None:
    """The model card: 30.5B parameters, 3.3B active."""
    found = plan_run(open_architecture(PLANS / "qwen3-30b-a3b.json"), Fleet(devices=8, memory=80 * 2**30), Workload())
    assert round(found.parameters / 1e9, 1) == 30.5
    assert round(found.active_parameters / 1e9, 1) in (3.3, 3.4)
    bf16 = next(row for row in found.precisions if row.precision == "bf16")
    assert bf16.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert bf16.weight_bytes == pytest.approx(2 * found.parameters, rel=0.001)


def test_cross_region_case_is_that_of_the_refit_plan() -> None:
    """1T parameters over 381 MB/s: 87.5 minutes whole, and at 3% changed within the order of the paper's 150 s."""
    fleet = Fleet(workers=4, devices=16, link=2e12 / (87.5 * 60), encode_threads=64)
    found = plan_run(open_architecture(PLANS / "moe-1t.json"), fleet, Workload())
    assert found.parameters == pytest.approx(1.04e12, rel=0.01)
    assert found.refit.full_seconds["transfer"] == pytest.approx(87.5 * 60 * found.parameters / 1e12)
    assert 50 < found.refit.delta_total < 200


def test_capacity_shrinks_with_reserve_and_never_below_nothing() -> None:
    arch = open_architecture(PLANS / "qwen3-30b-a3b.json")
    work = Workload(context=8192)
    room = [plan_run(arch, Fleet(memory=80e9, reserve=share), work).precisions for share in (0.0, 0.2)]
    for before, after in zip(*room, strict=True):
        assert before.kv_tokens is not None
        assert after.kv_tokens is not None
        assert before.kv_tokens >= after.kv_tokens
        assert before.sequences == before.kv_tokens // 8192
    by_name = {row.precision: row for row in room[0]}
    assert by_name["fp32"].kv_tokens == 0
    four = by_name["w4a4kv4"]
    assert four.kv_tokens is not None
    assert four.kv_bytes_per_token is not None
    assert 0 <= 80e9 - four.weight_bytes - four.kv_tokens * four.kv_bytes_per_token < four.kv_bytes_per_token


def test_no_guidance_costs_nothing() -> None:
    found = tiny_plan(sites=())
    assert (found.guidance_bytes_per_token, found.guidance_formula, found.guidance_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fleet", "work"),
    [
        ({"workers": 0}, {}),
        ({"link": 0.0}, {}),
        ({"reserve": 1.0}, {}),
        ({}, {"change_rate": 1.5}),
        ({}, {"precision": "w3"}),
        ({}, {"profile": "slow"}),
        ({}, {"layers": "some"}),
        ({}, {"rollout_rate": float("nan")}),
    ],
)
def test_numbers_that_no_run_has(fleet: dict[str, Any], work: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plan_run(open_architecture(TINY), replace(Fleet(), **fleet), replace(Workload(), **work))


def test_command_line(capsys: pytest.CaptureFixture[str], demo_run: Path) -> None:
    assert main(["plan", "tiny", "--run", str(demo_run), "--memory", "1"]) == 0
    text = capsys.readouterr().out
    assert "502,528 parameters" in text
    assert "assumed:" in text
    assert "step time" in text
    assert main(["plan", str(PLANS / "moe-1t.json"), "--link", "381", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rollout_seconds"] is None
    assert found["assumptions"]
    assert found["refit"]["speedup"] > 1
    assert main(["plan", "tiny", "--workers", "0"]) == 2
    assert "workers" in capsys.readouterr().err
