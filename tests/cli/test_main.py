"""Exit codes and messages of the program, as a user meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte
from halfbyte.cli import main as program

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from halfbyte.cli.main import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """``main`` sets thread variables for the whole process; take the change back after a test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def test_help_and_version() -> None:
    done = run()
    assert done.returncode == 0
    for command in ("train", "generate", "report", "doctor"):
        assert f"│ {command}" in done.stdout
    assert run("--version").stdout.strip() == halfbyte.__version__


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from halfbyte.cli.main import main; code = main(['train', '--help']); "
        "sys.exit(code or any(m in sys.modules for m in ('torch', 'numpy', 'transformers', 'halfbyte.train')))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["trian", "train"]),
        (["train", "--stepps", "3"], ["--stepps", "--steps"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "demo.toml"], ["demo.toml"]),
        (["train", "--set", "a=1", "b=2"], ["b=2"]),
        (["generate", "--model", "m"], ["--input"]),
        (["report"], ["RUN"]),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err
    for word in words:
        assert word in printed.err


def test_a_user_error_has_no_traceback(tmp_path: Path) -> None:
    done = run("report", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no run folder here\n  where: ")
    assert "Traceback" not in done.stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(run: Path, out: Path | None) -> Path:
        raise RuntimeError("a bug")

    monkeypatch.setattr("halfbyte.report.build", build)
    with pytest.raises(RuntimeError, match="a bug"):
        program.main(["report", str(tmp_path)])


def test_an_interrupt_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(run: Path, out: Path | None) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("halfbyte.report.build", build)
    assert program.main(["report", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    fifo = tmp_path / "run.toml"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", PROGRAM, "train", "--config", str(fifo)]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    with fifo.open("w"):  # returns when the program has opened the file; it then waits for text that never comes
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "interrupted\n"


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", PROGRAM, "report", str(tmp_path)]
    try:
        done = subprocess.run(
            command, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_report_prints_the_file_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "kind": "train", "reward/mean": 0.5}) + "\n")
    assert program.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert program.main(["report", str(tmp_path), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == (tmp_path / "report.html").read_text()
