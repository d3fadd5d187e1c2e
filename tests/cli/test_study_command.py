"""``halfbyte study``: what is printed, what is written, and errors without a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from study_case import write_run

from halfbyte.cli.main import main
from halfbyte.study.arms import BUILT_IN, configured


def runs(folder: Path) -> list[str]:
    out = []
    for arm in ("bf16", "qat"):
        for seed in (0, 1):
            path = folder / f"{arm}{seed}"
            write_run(path, configured({}, {**BUILT_IN[arm].sets, "train.steps": 3, "train.seed": seed}, "test"))
            out.append(str(path))
    return out


def test_report_on_runs_made_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("r.html", "r.json", "r.md")]
    flags = [f"--{name}={path}" for name, path in zip(("out", "json", "markdown"), files)]
    assert main(["study", "report", *runs(tmp_path), *flags]) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 runs finished" in printed
    assert "Difference to bf16" in printed
    assert str(files[0]) in printed
    data = json.loads(files[1].read_text())
    assert [row["arm"] for row in data["groups"][0]["arms"]] == ["bf16", "qat"]
    assert "| qat |" in files[2].read_text()
    assert main(["study", "report", str(files[1]), "--out", str(tmp_path / "again.html")]) == 0
    again = (tmp_path / "again.html").read_text().replace("r.json", "NAME")
    assert again == files[0].read_text().replace("bf160, bf161, qat0, ...", "NAME"), "the page needs the numbers only"


def test_the_plan_is_listed_and_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[study]\narms = ["bf16", "qat"]\nseeds = [0, 7]\n')
    assert main(["study", "run", str(file), "--out", str(tmp_path / "out"), "--plan-only"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["bf16 seed 0", "qat seed 0", "bf16 seed 7", "qat seed 7"]
    assert not (tmp_path / "out").exists()


def test_mistakes_are_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.toml"
    for text, words in (("[study]\nsedes = [1]\n", "did you mean seeds"), ("[study\n", "not TOML")):
        file.write_text(text)
        assert main(["study", "run", str(file)]) == 2
        assert words in capsys.readouterr().err
    assert main(["study", "run", str(tmp_path / "none.toml")]) == 2
    assert main(["study", "report", str(tmp_path)]) == 2
    assert "this is no run" in capsys.readouterr().err
    assert main(["study", "report"]) == 2
