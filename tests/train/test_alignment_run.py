"""A run under guidance: on by default, resumed to the same numbers, chosen under a budget, off where nothing is rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import small_config

from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.train import run
from halfbyte.train.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("torch_single_thread")
AUTO = {"alignment__layers": "auto", "alignment__bytes_per_token": 60.0, "learner__products": "bf16"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows without times."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in RunFolder(folder).rows()]


def rows(policy: Path, out: Path, reward: str, **sets: object) -> list[dict[str, float]]:
    assert run(small_config(policy, out, f"{reward}:sevens", **sets)) == 0
    return [row for row in metrics(out) if row["kind"] == "train"]


def test_guidance_is_the_default_and_closes_the_gap(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    guided = rows(policy_folder, tmp_path / "a", reward_module, learner__products="bf16")
    plain = rows(policy_folder, tmp_path / "b", reward_module, learner__products="bf16", alignment__method="none")
    assert all(row["align/unguided"] == 0.0 for row in guided)
    assert not any(key.startswith("align/") for row in plain for key in row)
    assert sum(r["gap/k3_kl"] for r in guided) < 0.1 * sum(r["gap/k3_kl"] for r in plain)


def test_spilled_guidance_changes_no_number(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    a = rows(policy_folder, tmp_path / "a", reward_module)
    b = rows(policy_folder, tmp_path / "b", reward_module, alignment__memory_mb=0.0)
    assert a == b
    assert not list((tmp_path / "b").glob(".guidance*"))


def test_auto_stays_within_its_budget_and_resumes_to_the_same_numbers(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    unbroken = rows(policy_folder, tmp_path / "a", reward_module, **AUTO)
    first, *later = [row["align/bytes_per_token"] for row in unbroken]
    assert first > 200
    assert all(0 < size <= 60 + 12 for size in later)  # the formula's bytes, and a byte a row for global scales
    half = small_config(policy_folder, tmp_path / "b", f"{reward_module}:sevens", **AUTO, learner__schedule="constant")
    whole = small_config(policy_folder, tmp_path / "c", f"{reward_module}:sevens", **AUTO, learner__schedule="constant")
    half.train.steps = 2
    assert run(half) == 0
    half.train.steps = 4
    assert run(half, resume=True) == 0
    assert run(whole) == 0
    drop = [r for r in metrics(tmp_path / "b") if not (r["kind"] == "eval" and r["step"] == 2)]
    assert drop == metrics(tmp_path / "c")


def test_nothing_is_recorded_where_nothing_is_rounded(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    (row, *_) = rows(policy_folder, tmp_path / "a", reward_module, precision="bf16")
    assert not any(key.startswith("align/") for key in row)
    (row, *_) = rows(policy_folder, tmp_path / "b", reward_module, learner__precision="bf16")
    assert not any(key.startswith("align/") for key in row)


def test_what_cannot_be_aligned_is_refused_before_the_run(policy_folder: Path, tmp_path: Path) -> None:
    for sets, error, match in (
        ({"alignment__method": "best"}, ConfigError, "best"),
        ({"alignment__method": "hard_replay", "alignment__bits": 1}, ConfigError, "hard_replay"),
        ({"alignment__layers": "9"}, ConfigError, "layer policy"),
        (
            {"learner__precision": {"preset": "w4a4kv4", "activation_spec": "mx_floor"}},
            SpecMismatchError,
            "format",
        ),
    ):
        with pytest.raises(error, match=match):
            run(small_config(policy_folder, tmp_path / "run", **sets))
        assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="bytes_per_token"):
        small_config(policy_folder, tmp_path / "run", alignment__layers="auto")
