"""Checkpoints of a run: masters, optimiser, counters, global scales that outlive versions. Whole or absent; a resumed run goes
on to the same numbers.

A checkpoint is a folder ``checkpoints/step_000100`` that is written under a hidden name, synced, and renamed. There is no
random state to save: prompts, sampling and mini-batch order are functions of (seed, step). One process writes its tensors to
one file; of several ranks each writes its own rows (``models/shards.py``), and any number of ranks reads either.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.learner.learner import Learner
from halfbyte.models.safetensors_io import SafetensorsFile, write_safetensors
from halfbyte.models.shards import ShardedTensors, open_tensors, write_shard
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
    ``keep``. Of several ranks all call it; it is whole when the call returns."""
    flight = flight or Flight()
    progress.in_flight = len(flight.batches)
    target = folder / f"step_{progress.step:06d}"
    work = folder / f".{target.name}.tmp"
    ranks, parameters = learner.ranks, learner.parameters
    if ranks.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    ranks.wait()
    optimiser = learner.optimiser.state()
    if ranks.size == 1:
        write_safetensors(work / "masters.safetensors", parameters.masters)
        write_safetensors(work / "optimiser.safetensors", optimiser)
    else:
        _write_shards(work, learner, optimiser)
    if ranks.rank == 0:
        write_atomic(work / "memory.json", json.dumps(learner.memory(), indent=2))
        if parameters.scales is not None:
            write_safetensors(work / "scales.safetensors", parameters.scales.state())
        save_flight(work, flight)
        write_atomic(work / "state.json", json.dumps(asdict(progress), indent=2))
    ranks.wait()
    if ranks.rank == 0:
        _sync_folder(work)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
        _sync_folder(folder)
        for old in _by_step(folder)[:-keep]:
            shutil.rmtree(old)
    ranks.wait()
    return target


def _write_shards(folder: Path, learner: Learner, optimiser: Mapping[str, Tensor]) -> None:
    rank, parameters = learner.ranks.rank, learner.parameters
    first = {name: parameters.span(name)[0] for name in parameters.masters}
    masters = {name: master for name, master in parameters.masters.items() if len(master)}
    if masters:
        write_shard(folder / "masters", rank, masters, first)
    moments = {}
    for key, tensor in optimiser.items():
        name, _, what = key.rpartition(".")
        if (rank == 0) if what == "step" else name in masters:  # a step count is the same on all ranks
            moments[key] = tensor
    if moments:
        write_shard(folder / "optimiser", rank, moments, {key: first[key.rpartition(".")[0]] for key in moments})
    for name in ("masters", "optimiser"):
        if (folder / name).exists():
            _sync_folder(folder / name)


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
    masters = open_tensors(path, "masters")
    for name, master in learner.parameters.masters.items():
        shape = (learner.parameters.rows(name), *master.shape[1:])
        if name not in masters or masters.shape(name) != shape:
            raise CheckpointError("a master weight is missing or mis-shaped", where=f"{path}: {name}")
        master.copy_(masters.rows(name, *learner.parameters.span(name)))
    if learner.parameters.scales is not None:
        learner.parameters.restore_scales(SafetensorsFile(path / "scales.safetensors"))
    learner.parameters.refresh()
    learner.optimiser.load_state(_own_moments(open_tensors(path, "optimiser"), learner))
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


def _own_moments(stored: ShardedTensors, learner: Learner) -> dict[str, Tensor]:
    """The optimiser's state of the rows that this process holds.

    Raises:
        CheckpointError: a moment is not as long as its parameter.
    """
    parameters, own = learner.parameters, {}
    for key in stored:
        name, _, what = key.rpartition(".")
        if what == "step" or name not in parameters.masters:
            own[key] = stored[key]
            continue
        if stored.shape(key)[0] != parameters.rows(name):
            raise CheckpointError("an optimiser moment is missing or mis-shaped", where=f"{stored.where}: {key}")
        own[key] = stored.rows(key, *parameters.span(name))
    return own


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
