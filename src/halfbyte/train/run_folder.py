"""The run folder: what lies where, written so that a kill at any moment leaves something usable.

``config.json`` (resolved), ``environment.json``, ``metrics.jsonl``, ``trajectories/``, ``checkpoints/``, ``model/`` (the trained
policy as an ordinary checkpoint), ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from halfbyte import __version__
from halfbyte.errors import ConfigError, DataError
from halfbyte.kernels import describe

__all__ = ["Bystander", "RunFolder", "environment", "write_atomic"]

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "pydantic", "reasoning-gym", "math-verify")


def write_atomic(path: Path, text: str) -> None:
    """Write a file under a temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def environment(seed: int) -> dict[str, Any]:
    """Versions, processor, kernels, threads, seed and git state: what a reader needs to repeat the run."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "halfbyte": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "kernels": describe(),
        "versions": versions,
        "seed": seed,
        "git": _git(),
    }


def _git() -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


class RunFolder:
    """Paths of a run and the append-only metrics file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"

    def create(self) -> None:
        """Make the folder and its subfolders."""
        for name in ("trajectories", "checkpoints"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write ``name`` atomically."""
        write_atomic(self.path / name, json.dumps(value, indent=2, sort_keys=True) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in ``name``, or None where there is none.

        Raises:
            DataError: the file is not a JSON object.
        """
        path = self.path / name
        if not path.exists():
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"not JSON: {error}", where=str(path)) from error
        if not isinstance(value, dict):
            raise DataError("not a JSON object", where=str(path))
        return value

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run folder for this process; the lock goes with the process, however it ends.

        Raises:
            ConfigError: another process is writing to this run.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    "another process is writing to this run folder",
                    where=str(self.path),
                    fix="wait for it, or use --out",
                ) from error
            yield

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``; a line is written in one call, so a kill leaves at most one broken line."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All whole lines of ``metrics.jsonl``."""
        if not self.metrics_path.exists():
            return []
        out = []
        for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:
                continue  # the line that a kill cut off
        return out

    def rewind(self, step: int) -> None:
        """Drop metrics of steps after ``step``: they will be computed again."""
        kept = [json.dumps(row) for row in self.rows() if row["step"] <= step]
        write_atomic(self.metrics_path, "".join(f"{line}\n" for line in kept))

    def save_trajectories(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write sampled trajectories of a step as JSON lines."""
        text = "".join(json.dumps(row) + "\n" for row in rows)  # ASCII: a reward's text may hold lone surrogates
        write_atomic(self.path / "trajectories" / f"step_{step:06d}.jsonl", text)


class Bystander(RunFolder):
    """The run folder of a rank that does not lead: it is read, and rank 0 writes."""

    def create(self) -> None:
        """Rank 0 does."""

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Rank 0 does."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Rank 0 holds it for all."""
        yield

    def append(self, row: Mapping[str, Any]) -> None:
        """Rank 0 does."""

    def rewind(self, step: int) -> None:
        """Rank 0 does."""

    def save_trajectories(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rank 0 does."""
