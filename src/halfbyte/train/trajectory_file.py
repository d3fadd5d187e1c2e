"""Trajectories as a pair of files: numbers as safetensors, the rest as JSON. What is read is what was written, to the bit.

Arrays of all trajectories lie end to end under one name each (``response_ids``, ``logprobs``, ...), their lengths in the JSON.
That holds the SHA-256 of the tensor file and of itself: two files of different writings are never taken together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.errors import CheckpointError
from halfbyte.models.precision import Precision
from halfbyte.models.safetensors_io import SafetensorsFile, write_safetensors
from halfbyte.models.trajectory import GuidanceRows, SamplingParams, Trajectory
from halfbyte.train.run_folder import write_atomic

__all__ = ["read_trajectories", "write_trajectories"]

_VERSION = 1
_PER_TOKEN = ("response_ids", "logprobs", "mask", "versions")


def write_trajectories(path: Path, batches: Mapping[int, Sequence[Trajectory]]) -> None:
    """Write ``path.safetensors`` and ``path.json``; the latter is there last, and says that both are whole."""
    numbers = [number for number, batch in batches.items() for _ in batch]
    trajectories = [t for batch in batches.values() for t in batch]
    arrays = {name: _joined(getattr(t, name) for t in trajectories) for name in ("prompt_ids", *_PER_TOKEN)}
    arrays["routes"] = _joined(t.routes for t in trajectories if t.routes is not None)
    arrays["supports"] = _joined(s for t in trajectories for s in t.supports or () if s is not None)
    # rows of unequal plans have unequal widths, so each plan has its own arrays
    layouts = sorted({t.guidance.layout for t in trajectories if t.guidance is not None})
    for i, layout in enumerate(layouts):
        found = [t.guidance for t in trajectories if t.guidance is not None and t.guidance.layout == layout]
        arrays[f"guidance_rows.{i}"] = _joined(g.rows for g in found)
        arrays[f"guidance_kv.{i}"] = _joined(g.kv for g in found)
    precisions: list[Precision] = []
    rows = []
    for number, t in zip(numbers, trajectories):
        if t.precision not in precisions:
            precisions.append(t.precision)
        rows.append(_row(t, layouts) | {"batch": number, "precision": precisions.index(t.precision)})
    tensors = path.with_name(f"{path.name}.safetensors")
    write_safetensors(tensors, {name: torch.from_numpy(a) for name, a in arrays.items() if a is not None})
    value = {
        "version": _VERSION,
        "sha256": hashlib.sha256(tensors.read_bytes()).hexdigest(),
        "layouts": layouts,
        "precisions": [p.to_json() for p in precisions],
        "trajectories": rows,
    }
    write_atomic(path.with_name(f"{path.name}.json"), json.dumps({"digest": _digest(value), "value": value}))


def read_trajectories(path: Path) -> dict[int, list[Trajectory]]:
    """What :func:`write_trajectories` wrote.

    Raises:
        CheckpointError: a file is missing or damaged, or they do not belong together.
    """
    tensors, text = (path.with_name(f"{path.name}.{kind}") for kind in ("safetensors", "json"))
    try:
        outer = json.loads(text.read_text(encoding="utf-8"))
        value = outer["value"]
        if _digest(value) != outer["digest"]:
            raise ValueError("it is not as it was written")
        if value["version"] != _VERSION:
            raise ValueError(f"version {value['version']}, not {_VERSION}")
        if value["sha256"] != hashlib.sha256(tensors.read_bytes()).hexdigest():
            raise ValueError(f"{tensors.name} is not the file that was written with it")
        return _read(value, {name: tensor.numpy() for name, tensor in SafetensorsFile(tensors).items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"unreadable trajectories: {error}", where=str(text), fix="delete this checkpoint folder"
        ) from error


def _read(value: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> dict[int, list[Trajectory]]:
    precisions = [Precision.from_json(p) for p in value["precisions"]]
    cursors = {name: _Cursor(name, array) for name, array in arrays.items()}
    out: dict[int, list[Trajectory]] = {}
    for row in value["trajectories"]:
        prompt, length = row["prompt"], row["response"]
        supports = None
        if row["supports"] is not None:
            supports = [None if n is None else cursors["supports"].next(n) for n in row["supports"]]
        guidance = None
        if row["guidance"] is not None:
            layout, count, version = row["guidance"]
            rows, kv = (cursors[f"guidance_{part}.{layout}"].next(count) for part in ("rows", "kv"))
            guidance = GuidanceRows(rows, kv, value["layouts"][layout], version)
        sampling = row["sampling"] | {key: tuple(row["sampling"][key]) for key in ("stop_ids", "stop")}
        t = Trajectory(
            prompt_ids=cursors["prompt_ids"].next(prompt),
            **{name: cursors[name].next(length) for name in _PER_TOKEN},
            sampling=SamplingParams(**sampling),
            precision=precisions[row["precision"]],
            finish_reason=row["finish_reason"],
            group=row["group"],
            sample=row["sample"],
            routes=cursors["routes"].next(prompt + length - 1) if row["routes"] else None,
            supports=supports,
            guidance=guidance,
            turns=tuple(row["turns"]),
            reward=row["reward"],
            info=row["info"],
        )
        out.setdefault(row["batch"], []).append(t)
    for cursor in cursors.values():
        cursor.finish()
    return out


def _row(t: Trajectory, layouts: Sequence[str]) -> dict[str, Any]:
    g = t.guidance
    return {
        "group": t.group,
        "sample": t.sample,
        "prompt": len(t.prompt_ids),
        "response": len(t.response_ids),
        "sampling": asdict(t.sampling),
        "finish_reason": t.finish_reason,
        "routes": t.routes is not None,
        "supports": None if t.supports is None else [None if s is None else len(s) for s in t.supports],
        "guidance": None if g is None else [layouts.index(g.layout), len(g), g.version],
        "turns": list(t.turns),
        "reward": t.reward,
        "info": t.info,
    }


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _joined(parts: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """All parts end to end, None without any."""
    found = list(parts)
    return np.concatenate(found) if found else None


class _Cursor:
    """Hands out an array piece by piece: views, of the mapped file that stays until the last of them is gone."""

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self.name, self.array, self.at = name, array, 0

    def next(self, count: int) -> npt.NDArray[Any]:
        piece = self.array[self.at : self.at + count]
        if len(piece) != count:
            raise ValueError(f"{self.name} is too short")
        self.at += count
        return piece

    def finish(self) -> None:
        if self.at != len(self.array):
            raise ValueError(f"{self.name} is too long")
