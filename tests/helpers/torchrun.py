"""A program on several ranks, each with one thread, as torchrun starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: str = "", **extra: str) -> dict[str, str]:
    """``folder`` is importable, too."""
    path = [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), folder, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path)), **extra}


def command(ranks: int, *arguments: str) -> list[str]:
    """``torchrun`` of ``arguments`` (``-m module ...`` or ``script.py ...``) on a port that the system chooses."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *launcher, *arguments]


def torchrun(
    ranks: int, *arguments: str, folder: str = "", timeout: float = 900, **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(ranks, *arguments),
        env=environment(folder, **extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
