"""Saved samples carry what a diagnosis needs, and it agrees with the metrics of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import small_config

from halfbyte.cli.main import main
from halfbyte.diagnosis import read_tables
from halfbyte.train import run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps in FP4 with all samples of every step saved."""
    out = tmp_path_factory.mktemp("saved") / "run"
    sets: dict[str, Any] = {
        "precision": "w4a4kv4",
        "train__save_trajectories_every": 1,
        "train__saved_trajectories": 24,
        "rollout__max_tokens": 16,
        "learner__lr": 3e-4,
        "objective__correction": "token_tis",
    }
    assert run(small_config(Path("tiny"), out, **sets)) == 0
    return out


def test_the_gap_of_the_file_is_the_gap_of_the_metrics(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    trained = {row["step"]: row for row in rows if row["kind"] == "train" and "gap/mean_abs" in row}
    tables = {table.step: table for table in read_tables(finished)}
    assert sorted(tables) == [1, 2, 3, 4]
    compared = 0
    for step, row in trained.items():
        table = tables[step]
        seen = table.mask & (table.advantages != 0)  # samples without advantage are not scored for the metrics
        assert seen.sum() == row["gap/tokens"]
        assert np.abs(table.gap[seen]).mean() == pytest.approx(row["gap/mean_abs"], rel=1e-4, abs=1e-8)
        assert table.rewards is not None
        assert table.rewards.mean() == pytest.approx(row["reward/mean"], abs=1e-6)
        compared += 1
    assert compared >= 1


def test_weights_are_those_of_the_correction(finished: Path) -> None:
    seen = 0
    for path in sorted((finished / "trajectories").iterdir()):
        for line in map(json.loads, path.read_text().splitlines()):
            assert ("weights" in line) == (line["advantage"] != 0)
            if "weights" in line:
                gap = np.array(line["learner_logprobs"]) - np.array(line["logprobs"])
                expected = np.where(np.array(line["mask"]) == 1, np.minimum(np.exp(gap), 2.0), 0.0)
                np.testing.assert_allclose(line["weights"], expected, atol=1e-6)
                assert len(line["selected"]) == len(gap)
                seen += len(gap)
    assert seen > 50


def test_turns_and_masks_are_saved(finished: Path) -> None:
    line = json.loads((finished / "trajectories" / "step_000001.jsonl").read_text().splitlines()[0])
    n = len(line["response_ids"])
    assert all(len(line[key]) == n for key in ("logprobs", "learner_logprobs", "mask", "versions"))
    assert line["turns"][0] == 0
    assert set(line["mask"]) <= {0, 1}


def test_a_run_folder_is_diagnosed(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--segments", "turn", "--json", str(tmp_path / "x.json"), "--out", str(tmp_path / "x.html")]
    assert main(["diagnose", str(finished), *flags]) == 0
    assert "Sign structure" in capsys.readouterr().out
    assert [row["step"] for row in json.loads((tmp_path / "x.json").read_text())] == [1, 2, 3, 4]
    assert "<svg" in (tmp_path / "x.html").read_text()
