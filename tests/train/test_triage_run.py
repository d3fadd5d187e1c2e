"""A run with TRIAGE: its metrics, its reference statistics in the checkpoints, and the same numbers after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_run import small_config

from halfbyte.errors import ConfigError
from halfbyte.train import run
from halfbyte.train.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("torch_single_thread")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in RunFolder(folder).rows()]


@pytest.mark.parametrize("segmenter", ["change_point", "delimiter"])
def test_a_resumed_run_goes_on_with_the_reference_it_had(
    policy_folder: Path, tmp_path: Path, reward_module: str, segmenter: str
) -> None:
    out = tmp_path / "run"
    config = small_config(
        policy_folder,
        out,
        f"{reward_module}:sevens",
        objective__correction="triage",
        objective__correction_options={"reference_batches": 2, "alpha": 1.0, "z_min": -10.0, "e_min": 0.0},
        objective__segmenter=segmenter,
        learner__precision="bf16",
        train__keep_checkpoints=4,
    )
    assert run(config) == 0
    whole = rows(out)
    trained = [row for row in whole if row["kind"] == "train"]
    for row in trained:
        assert {"quadrant/mass_neg_neg", "segment/over_threshold", "correction/mass_kept"} <= row.keys()
        assert row["quadrant/share_neg_neg"] > 0, "rollout and learner differ in precision here"
    saved = {
        path.name: json.loads((path / "memory.json").read_text())["correction"]
        for path in sorted((out / "checkpoints").iterdir())
    }
    assert [memory["batches"] for memory in saved.values()] == [1.0, 2.0, 2.0, 2.0]
    assert trained[0]["correction/reference_loc"] == pytest.approx(saved["step_000001"]["loc"], rel=1e-5)
    for name in ("step_000002", "step_000003", "step_000004"):
        shutil.rmtree(out / "checkpoints" / name)
    assert run(config, resume=True) == 0
    assert rows(out) == whole


def test_options_of_another_rule_are_refused_before_the_run_folder_is_made(policy_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="no option 'cap'"):
        run(
            small_config(policy_folder, out, objective__correction="triage", objective__correction_options={"cap": 2.0})
        )
    assert not out.exists()
