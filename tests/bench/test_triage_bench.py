"""Planted damage: what the batches hold, what finds it, that noise alone selects nothing (I12), and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from halfbyte.bench import triage as bench
from halfbyte.bench.planted import SCENARIOS, Scenario, plant
from halfbyte.cli.main import main
from halfbyte.config import ObjectiveConfig

NULLS = [s for s in SCENARIOS if s.prevalence == 0 and s.decoys == 0]


def by_method(rows: list[bench.SelectionRow], gates: str = "default") -> dict[str, bench.SelectionRow]:
    return {row.method: row for row in rows if row.gates in (gates, "")}


def test_planted_clusters_are_where_and_what_the_scenario_says() -> None:
    scenario = Scenario("", prevalence=0.2, density=0.6, damage=0.5)
    batch = plant(scenario, 3)
    assert bool((batch.tokens.advantages[batch.damaged] < 0).all())
    negative = int((batch.tokens.advantages < 0).sum())
    assert int(batch.damaged.sum()) == pytest.approx(0.2 * negative, abs=60)
    assert not bool(batch.push[~batch.damaged].any())
    hit = batch.push[batch.damaged] > 0
    assert float(hit.float().mean()) == pytest.approx(0.6, abs=0.05)
    assert float(batch.push[batch.push > 0].mean()) == pytest.approx(0.5, rel=0.1)
    assert torch.equal(plant(scenario, 3).tokens.gap, batch.tokens.gap)
    assert not torch.equal(plant(scenario, 4).tokens.gap, batch.tokens.gap)


@pytest.mark.parametrize("scenario", NULLS, ids=lambda s: s.name)
def test_i12_noise_alone_selects_nothing(scenario: Scenario) -> None:
    """Also at five times the size that the reference knows, and with heavy tails; every segmenter."""
    for row in bench.detect(scenario, 8):
        if row.gates == "default":
            assert row.touched == 0, row


def test_without_the_direction_test_noise_of_five_times_the_size_is_taken_for_damage() -> None:
    """Why the test is there: the other gates alone select a fifth of the diagnosed tokens."""
    scenario = next(s for s in SCENARIOS if s.name == "null, 5x noise")
    found = by_method(list(bench.detect(scenario, 3)), "without direction test")
    assert found["fixed 16"].touched == 3
    assert found["fixed 16"].selected > 0.2 * 64 * 512 / 2


@pytest.mark.parametrize(
    "name", ["density 1.0", "density 0.7", "sparse 2%", "heavy tails", "50% damaged", "90% damaged"]
)
def test_the_default_segmenter_finds_most_damage_and_little_else(name: str) -> None:
    scenario = next(s for s in SCENARIOS if s.name == name)
    rows = by_method(list(bench.detect(scenario, 3)))
    best = rows[ObjectiveConfig().segmenter]
    assert best.f1 is not None
    assert best.f1 > 0.8
    assert best.precision is not None
    assert best.precision > 0.8
    assert all(best.f1 >= (row.f1 or 0.0) for row in rows.values())


def test_direction_by_segment_beats_tokens_sequences_and_size_at_the_same_budget() -> None:
    scenario = next(s for s in SCENARIOS if s.name == "density 0.7")
    f1 = {row.method: row.f1 or 0.0 for row in bench.rank(scenario, 3)}
    others = [v for k, v in f1.items() if not k.startswith("segments by z")]
    assert f1["segments by z, change_point"] > 0.8
    assert f1["segments by z, fixed 16"] > 0.6
    assert max(others) < 0.55


def test_decoys_of_the_same_size_fool_size_and_not_direction() -> None:
    scenario = dataclasses.replace(SCENARIOS[1], decoys=0.3)
    rows = by_method(list(bench.detect(scenario, 3)))
    assert (rows["change_point"].precision or 0.0) > 0.8
    f1 = {row.method: row.f1 or 0.0 for row in bench.rank(scenario, 3)}
    assert f1["segments by mean |g|, fixed 16"] < 0.3


def test_a_million_tokens_are_diagnosed_in_under_a_second_of_one_thread() -> None:
    """CPU time, so that a busy machine does not show."""
    rows = list(bench.speed())
    assert {row.method for row in rows} == set(bench.SEGMENTERS)
    for row in rows:
        assert row.tokens == 1_000_000
        assert row.segment + row.correct + row.quadrants < 1.0, row


def test_the_command_prints_tables_and_writes_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfbyte.bench.planted.SCENARIOS", (SCENARIOS[0], SCENARIOS[10]))
    timed = bench.speed
    monkeypatch.setattr(bench, "speed", lambda: timed(20_000))
    out = tmp_path / "triage.json"
    assert main(["bench", "triage", "--batches", "1", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "TRIAGE's own selection" in shown
    assert "0 of 1, 0 tokens" in shown
    data = json.loads(out.read_text())
    assert {row["scenario"] for row in data["rows"]} == {"density 1.0", "null"}
    assert {row["mode"] for row in data["rows"]} == {"detect", "rank"}
    assert len(data["speed"]) == len(bench.SEGMENTERS)
    assert main(["bench", "triage", "--batches", "0"]) == 2
