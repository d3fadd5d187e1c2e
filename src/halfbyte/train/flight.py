"""What is in flight between two steps, in a checkpoint: batches that are kept, and groups that will be played again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfbyte.errors import CheckpointError
from halfbyte.models.trajectory import Trajectory
from halfbyte.train.run_folder import write_atomic
from halfbyte.train.trajectory_file import read_trajectories, write_trajectories

__all__ = ["Flight", "load_flight", "save_flight"]


@dataclass(frozen=True)
class Flight:
    """What was submitted and not trained on.

    Arguments:
        batches: step -> its trajectories, where they are kept.
        groups: numbers of the groups, where they are played again.
        next_group: the first group that was never submitted; 0 where whole batches are.
        dropped: groups whose playing was given up so far, to be played again.
    """

    batches: Mapping[int, Sequence[Trajectory]] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    next_group: int = 0
    dropped: int = 0


def save_flight(folder: Path, flight: Flight) -> None:
    """Write what there is into a checkpoint folder; nothing for a synchronous run."""
    if flight.batches:
        write_trajectories(folder / "batches", flight.batches)
    if flight.next_group:
        value = {"groups": list(flight.groups), "next_group": flight.next_group, "dropped": flight.dropped}
        write_atomic(folder / "groups.json", json.dumps(value))


def load_flight(folder: Path, batches: int) -> Flight:
    """What :func:`save_flight` wrote.

    Arguments:
        batches: how many were kept, as the checkpoint's counters say.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    kept = read_trajectories(folder / "batches") if batches else {}
    if len(kept) != batches:
        raise CheckpointError(f"{len(kept)} batches in flight", where=str(folder), expected=str(batches))
    path = folder / "groups.json"
    if not path.exists():
        return Flight(kept)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        groups = tuple(int(group) for group in value["groups"])
        return Flight(kept, groups, int(value["next_group"]), int(value["dropped"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"unreadable groups in flight: {error}", where=str(path), fix="delete this checkpoint folder"
        ) from error
