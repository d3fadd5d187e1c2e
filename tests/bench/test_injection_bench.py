"""The injection study: its plan, its file that survives kills, its intervals, and one small run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from halfbyte.bench import injection as bench
from halfbyte.bench.injection import CLEAN, Cell, Study, differences, plan, read, run
from halfbyte.cli.main import main
from halfbyte.errors import ConfigError, DataError

SMALL = Study(prompts=4, samples=4, steps=3, start=1, eval_prompts=8)


def test_the_plan_has_every_cell_once_and_the_clean_run_first() -> None:
    cells = plan(["neg_neg", "pos_pos"], ["none", "opsm"], [3, 4])
    assert len(cells) == len(set(cells)) == 2 * (2 + 2 * 2)
    assert cells[0] == Cell(3, CLEAN, "none")
    assert {c.seed for c in cells[:6]} == {3}
    with pytest.raises(ConfigError, match="neg_neg"):
        plan(["--"], ["none"], [0])
    with pytest.raises(ConfigError, match="token_tis"):
        plan(["neg_neg"], ["tis"], [0])


def test_a_killed_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Cell] = []

    def fake(study: Study, cell: Cell) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(cell)
        return {"accuracy": 0.1 * len(done), "cpu": 1.0}

    monkeypatch.setattr(bench, "_train", fake)
    cells, path = plan(["neg_neg"], ["none", "opsm"], [0, 1]), tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, cells, path, lambda line: None)
    assert list(read(path, SMALL)) == cells[:3]
    with path.open("a") as file:
        file.write('{"seed": 0, "quadr')  # a kill in the middle of a line
    monkeypatch.setattr(bench, "_train", lambda study, cell: {"accuracy": 0.5, "cpu": 1.0})
    rows = run(SMALL, cells, path, lambda line: None)
    assert list(rows) == cells
    assert [rows[c]["accuracy"] for c in cells[:3]] == pytest.approx([0.1, 0.2, 0.3])
    assert read(path, SMALL).keys() == set(cells)
    with pytest.raises(DataError, match="another steps"):
        read(path, Study(**(asdict(SMALL) | {"steps": 9})))


def test_differences_are_paired_t_intervals() -> None:
    values = {(0, CLEAN): 0.7, (1, CLEAN): 0.6, (2, CLEAN): 0.8, (0, "neg_neg"): 0.5, (1, "neg_neg"): 0.45}
    values |= {(2, "neg_neg"): 0.55, (3, "neg_neg"): 0.0}  # the last has no partner
    rows = {Cell(seed, quadrant, "none"): {"accuracy": v} for (seed, quadrant), v in values.items()}
    found = {d.quadrant: d for d in differences(rows, against=lambda c: Cell(c.seed, CLEAN, "none"))}
    assert found[CLEAN].mean == found[CLEAN].low == found[CLEAN].high == 0.0
    d = found["neg_neg"]
    assert d.seeds == 3
    assert d.mean == pytest.approx(-0.2)
    # deltas -.20, -.15, -.25: standard deviation .05, t with 2 degrees of freedom 4.3027
    assert d.high - d.mean == pytest.approx(4.303 * 0.05 / math.sqrt(3), rel=1e-3)
    single = {cell: row for cell, row in rows.items() if cell.seed == 0}
    assert next(iter(differences(single, against=lambda c: Cell(0, CLEAN, "none")))).high == math.inf


def test_cells_of_one_seed_are_alike_until_the_injection_begins(tmp_path: Path) -> None:
    cells = [Cell(0, CLEAN, "none"), Cell(0, "neg_neg", "none"), Cell(0, "neg_neg", "token_tis")]
    rows = run(SMALL, cells, tmp_path / "rows.jsonl", lambda line: None)
    first = [rows[cell]["reward"][:2] for cell in cells]  # the update of version 0 has no gap yet
    assert first[0] == first[1] == first[2]
    assert rows[cells[0]]["injected"] == 0.0
    assert rows[cells[1]]["injected"] > 0.0
    again = bench._train(SMALL, cells[1])
    assert again["reward"] == rows[cells[1]]["reward"]
    assert again["accuracy"] == rows[cells[1]]["accuracy"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_train", lambda study, cell: {"accuracy": 0.1 * (cell.quadrant == CLEAN), "cpu": 1.0})
    out = tmp_path / "rows.jsonl"
    flags = ["--quadrants", "neg_neg", "--corrections", "none,opsm", "--seeds", "2", "--steps", "5"]
    assert main(["bench", "injection", "--out", str(out), *flags]) == 0
    printed = capsys.readouterr().out
    assert "-10.0 to -10.0" in printed
    assert len(out.read_text().splitlines()) == 2 * 4
    assert json.loads(out.read_text().splitlines()[0])["study"]["steps"] == 5
    assert main(["bench", "injection", "--out", str(out), "--tail", "thin", "--steps", "5"]) == 2


def test_the_documented_figures_are_those_of_the_data() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "injection.md").read_text(encoding="utf-8")
    rows = read(root / "bench" / "injection.jsonl", Study())
    signs = {"neg": "-", "pos": "+"}

    def clean(cell: Cell) -> Cell:
        return Cell(cell.seed, CLEAN, "none")

    shown = 0
    for d in differences(rows, against=clean):
        if d.quadrant == CLEAN:
            continue
        a, g = (signs[part] for part in d.quadrant.split("_"))
        figures = f"{100 * d.mean:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})"
        accuracy = f"{d.accuracy:.3f}".removeprefix("0")
        lines = [line for line in page.splitlines() if line.startswith(f"| ({a}, {g}) |") and figures in line]
        assert any(f"| {d.seeds} | {accuracy} |" in line for line in lines), (d, figures)
        shown += 1
    assert shown == 9
    assert all(d.seeds >= 3 for d in differences(rows, against=clean))
    half = read(root / "bench" / "injection_half.jsonl", Study(scale=0.75))
    three = half | {cell: row for cell, row in rows.items() if cell.quadrant == CLEAN}
    (d,) = (d for d in differences(three, against=clean) if d.quadrant == "neg_neg")
    assert f"{100 * d.mean:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})" in page
