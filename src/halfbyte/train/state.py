"""Checkpoints of a run: masters, optimiser, counters, global scales that outlive versions. Whole or absent; a resumed run goes
on to the same numbers.

A checkpoint is a folder ``checkpoints/step_000100`` that is written under a hidden name, synced, and renamed. There is no
random state to save: prompts, sampling and mini-batch order are functions of (seed, step).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.learner.learner import Learner
from halfbyte.models.safetensors_io import SafetensorsFile, write_safetensors
from halfbyte.train.flight import Flight, save_flight
from halfbyte.train.run_folder import write_atomic

__all__ = ["Progress", "latest_checkpoint", "load_state", "save_state"]


@dataclass
class Progress:
    """Counters that survive a resume.

    Arguments:
        step: training steps done.
        version: weight version that the engine serves; it never restarts (miles #2835).
        guidance: the plan that ``alignment.layers = auto`` has settled on, None before.
        accuracy_before: held-out accuracy before the first step, None if not measured yet.
        in_flight: batches that the checkpoint keeps, see ``halfbyte.train.flight``.
        wall_seconds, rollout_seconds, learner_seconds: spent so far over all attempts up to this checkpoint.
    """

    step: int = 0
    version: int = 0
    guidance: list[list[Any]] | None = None
    accuracy_before: float | None = None
    in_flight: int = 0
    wall_seconds: float = 0.0
    rollout_seconds: float = 0.0
    learner_seconds: float = 0.0


def save_state(folder: Path, learner: Learner, progress: Progress, keep: int, flight: Flight | None = None) -> Path:
    """Write ``folder/step_NNNNNN`` (masters, optimiser, reference statistics, counters, what is in flight); keep the newest
    ``keep``."""
    flight = flight or Flight()
    progress.in_flight = len(flight.batches)
    target = folder / f"step_{progress.step:06d}"
    work = folder / f".{target.name}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_safetensors(work / "masters.safetensors", learner.parameters.masters)
    write_safetensors(work / "optimiser.safetensors", learner.optimiser.state())
    write_atomic(work / "memory.json", json.dumps(learner.memory(), indent=2))
    if learner.parameters.scales is not None:
        write_safetensors(work / "scales.safetensors", learner.parameters.scales.state())
    save_flight(work, flight)
    write_atomic(work / "state.json", json.dumps(asdict(progress), indent=2))
    _sync_folder(work)
    if target.exists():
        shutil.rmtree(target)
    work.rename(target)
    _sync_folder(folder)
    for old in _by_step(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = [p for p in _by_step(folder) if (p / "state.json").exists()]
    return found[-1] if found else None


def _by_step(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step_*") if p.name[5:].isdigit()), key=lambda p: int(p.name[5:]))


def load_state(path: Path, learner: Learner) -> Progress:
    """Restore masters, optimiser and counters into ``learner``.

    Raises:
        CheckpointError: a file is damaged, or its tensors do not fit the model.
    """
    try:
        data = json.loads((path / "state.json").read_text(encoding="utf-8"))
        known = {f.name for f in fields(Progress)}
        progress = Progress(**{k: v for k, v in data.items() if k in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"unreadable training state: {error}", where=str(path / "state.json"), fix="delete this checkpoint folder"
        ) from error
    masters = SafetensorsFile(path / "masters.safetensors")
    for name, master in learner.parameters.masters.items():
        if name not in masters or masters[name].shape != master.shape:
            raise CheckpointError("a master weight is missing or mis-shaped", where=f"{path}: {name}")
        master.copy_(masters[name])
    if learner.parameters.scales is not None:
        learner.parameters.restore_scales(SafetensorsFile(path / "scales.safetensors"))
    learner.parameters.refresh()
    learner.optimiser.load_state(SafetensorsFile(path / "optimiser.safetensors"))
    if (path / "memory.json").exists():  # checkpoints of earlier versions have none
        try:
            learner.remember(json.loads((path / "memory.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"unreadable reference statistics: {error}",
                where=str(path / "memory.json"),
                fix="delete this checkpoint",
            ) from error
    return progress


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
