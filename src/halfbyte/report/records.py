"""What a run folder holds, read tolerantly: a run may be going on, may have been killed, may lack files.

A line of ``metrics.jsonl`` that a kill cut off is skipped and counted. Values that are not finite numbers are left
out, so a chart has a gap there. Nothing here is trusted: prompts and responses are text that anyone may have written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import DataError

__all__ = ["Record", "Row", "Sample", "parse_line", "read_record", "read_samples"]

#: One line of metrics: the step and its finite numbers.
Row = tuple[int, Mapping[str, float]]


@dataclass(frozen=True)
class Sample:
    """A sampled trajectory as text. ``correct`` and ``reward`` are None where the file does not say."""

    prompt: str
    response: str
    reward: float | None
    correct: bool | None
    finish_reason: str


@dataclass(frozen=True)
class Record:
    """A run folder's content.

    Arguments:
        folder: where it was read.
        train, evaluations: rows by step, ascending; of two rows for one step the later one in the file counts.
        config, environment, summary: the JSON objects, empty where there is no (readable) file.
        broken_lines: lines of ``metrics.jsonl`` that are not JSON objects with a step.
        sample_files: step -> file of sampled trajectories, ascending.
    """

    folder: Path
    train: tuple[Row, ...] = ()
    evaluations: tuple[Row, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    broken_lines: int = 0
    sample_files: Mapping[int, Path] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """A run writes ``summary.json`` last."""
        return bool(self.summary)

    @property
    def last_step(self) -> int:
        """The largest step seen; 0 before the first."""
        return max((step for step, _ in (*self.train, *self.evaluations)), default=0)

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a training metric, ascending, where it is a finite number."""
        return [(float(step), values[key]) for step, values in self.train if key in values]


def read_record(folder: Path) -> Record:
    """Read a run folder.

    Raises:
        DataError: the folder does not exist, or holds no metrics that can be read.
    """
    if not folder.is_dir():
        raise DataError("there is no run folder here", where=str(folder), expected="a folder that halfbyte train wrote")
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(
            "this folder is not a run that has measured anything",
            where=str(folder),
            expected="metrics.jsonl",
            fix="name the folder given to halfbyte train --out; the file is there after the first evaluation",
        )
    try:
        text = metrics.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"the metrics cannot be read: {error.strerror}", where=str(metrics)) from error
    by_kind, broken = _rows(text.split("\n"))
    return Record(
        folder=folder,
        train=tuple(sorted(by_kind["train"].items())),
        evaluations=tuple(sorted(by_kind["eval"].items())),
        config=_object(folder / "config.json"),
        environment=_object(folder / "environment.json"),
        summary=_object(folder / "summary.json"),
        broken_lines=broken,
        sample_files=_sample_files(folder / "trajectories"),
    )


def read_samples(path: Path, limit: int) -> list[Sample]:
    """The first ``limit`` whole trajectories of a file; none where it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    samples: list[Sample] = []
    for line in lines:
        value = parse_line(line)
        if value is None:
            continue
        reward, correct = value.get("reward"), value.get("correct")
        samples.append(
            Sample(
                prompt=_text(value.get("prompt_text")),
                response=_text(value.get("response_text")),
                reward=_finite(reward),
                correct=correct if isinstance(correct, bool) else None,
                finish_reason=_text(value.get("finish_reason")),
            )
        )
        if len(samples) == limit:
            break
    return samples


def _rows(lines: Iterable[str]) -> tuple[dict[str, dict[int, dict[str, float]]], int]:
    rows: dict[str, dict[int, dict[str, float]]] = {"train": {}, "eval": {}}
    broken = 0
    for line in lines:
        if not line.strip():
            continue
        value = parse_line(line)
        step = None if value is None else value.get("step")
        if value is None or type(step) is not int:
            broken += 1
            continue
        numbers = {
            key: number for key, item in value.items() if key != "step" and (number := _finite(item)) is not None
        }
        kind = value.get("kind")
        if isinstance(kind, str) and kind in rows:
            rows[kind][step] = numbers
    return rows, broken


def _sample_files(folder: Path) -> dict[int, Path]:
    found = {}
    for path in sorted(folder.glob("step_*.jsonl")):
        digits = path.stem.removeprefix("step_")
        if digits.isascii() and digits.isdigit():
            found[int(digits)] = path
    return dict(sorted(found.items()))


def _object(path: Path) -> dict[str, Any]:
    try:
        return parse_line(path.read_text(encoding="utf-8", errors="replace")) or {}
    except OSError:
        return {}


def parse_line(text: str) -> dict[str, Any] | None:
    """The JSON object of a line, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
