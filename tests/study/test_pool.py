"""The pool: as many at a time as declared, exit codes handed on, interrupts passed down, no child outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from halfbyte.study.pool import Command, environment_of, run_pool

ROOT = Path(__file__).resolve().parents[2]


def command(name: str, code: str, folder: Path) -> Command:
    return Command(name, [sys.executable, "-S", "-c", code], folder / f"{name}.log")


def test_no_more_processes_than_declared_and_codes_are_handed_on(tmp_path: Path) -> None:
    seen: list[int] = []
    codes: dict[str, int] = {}
    codes_wanted = {"a": 0, "b": 3, "c": 0, "d": 130}
    commands = [
        command(n, f"import time, sys; print('hello {n}'); time.sleep(.1); sys.exit({code})", tmp_path)
        for n, code in codes_wanted.items()
    ]
    whole = run_pool(
        commands,
        processes=2,
        environ=dict(os.environ),
        ended=codes.__setitem__,
        tick=lambda running: seen.append(len(running)),
        interval=0.01,
    )
    assert whole
    assert codes == codes_wanted
    assert max(seen) == 2
    assert (tmp_path / "b.log").read_text() == "hello b\n"


def test_a_killed_process_takes_nothing_with_it(tmp_path: Path) -> None:
    codes: dict[str, int] = {}
    commands = [command("dead", "import os; os.kill(os.getpid(), 9)", tmp_path), command("alive", "pass", tmp_path)]
    assert run_pool(commands, processes=1, environ=dict(os.environ), ended=codes.__setitem__, interval=0.01)
    assert codes == {"dead": -signal.SIGKILL, "alive": 0}


def test_a_child_has_its_own_threads() -> None:
    made = environment_of(3, {"OMP_NUM_THREADS": "8", "OTHER": "x"})
    assert made == {"OMP_NUM_THREADS": "3", "HALFBYTE_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE", "OTHER": "x"}
    assert environment_of(1, {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


def test_an_interrupt_asks_children_to_stop_and_starts_no_more(tmp_path: Path) -> None:
    polite = (
        "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(130)); print('up', flush=True); time.sleep(60)"
    )
    codes: dict[str, int] = {}
    commands = [command("a", polite, tmp_path), command("b", "pass", tmp_path)]

    def interrupt() -> None:
        while not (tmp_path / "a.log").exists() or "up" not in (tmp_path / "a.log").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert not run_pool(commands, processes=1, environ=dict(os.environ), ended=codes.__setitem__, interval=0.01)
    assert codes == {"a": 130}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_the_study_however_it_dies(tmp_path: Path, number: int) -> None:
    child = "import os; print(os.getpid(), flush=True)\nwhile os.read(0, 9): pass"
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom halfbyte.study.pool import Command, run_pool\n"
        f"run_pool([Command('a', [sys.executable, '-S', '-c', {child!r}], Path({str(tmp_path / 'a.log')!r}))],"
        " processes=1, environ=dict(os.environ), ended=print)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    deadline = time.monotonic() + 60
    while not (tmp_path / "a.log").exists() or not (tmp_path / "a.log").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int((tmp_path / "a.log").read_text())
    time.sleep(0.2)
    assert _alive(pid), "it waits as long as its parent lives"
    parent.send_signal(number)
    parent.wait()
    while _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False
