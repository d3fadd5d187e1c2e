"""The A/A pilot: the baseline against itself, and how much of a difference is noise."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.files import read_object, write_object
from halfbyte.trial.conclude import read_pilot
from halfbyte.trial.errors import IntegrityError, UnavailableError
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.lock import pilot_genesis
from halfbyte.trial.pairs import pairs

__all__ = ["noise_of", "prepare", "summary"]


def prepare(folder: TrialFolder, *, again: bool = False) -> str:
    """Make ready for a pilot; returns the digest that its chain starts from.

    Raises:
        UnavailableError: an earlier pilot had another baseline, other tasks or settings, and ``again`` was not given.
        IntegrityError: the trial is locked, and the pilot is part of what was locked.
    """
    start, note = pilot_genesis(folder), folder.path / "pilot.json"
    earlier = read_object(note)
    if folder.lock.exists() and (again or earlier is None or earlier.get("genesis") != start):
        raise IntegrityError("the trial is locked, with its pilot or without one", where=str(folder.lock))
    if again:
        for path in (folder.records("pilot"), folder.blocks("pilot"), folder.abandoned("pilot"), note):
            path.unlink(missing_ok=True)
    elif earlier is not None and earlier.get("genesis") != start:
        what = "the pilot that is there had another baseline, other tasks or other settings"
        raise UnavailableError(what, where=str(folder.records("pilot")), fix="--again throws it away")
    write_object(note, {"genesis": start})
    return start


def noise_of(folder: TrialFolder) -> float | None:
    """Share of pairs whose verdict flips between two runs of the baseline; None without a finished pilot of these settings."""
    found = [pair for task in pairs(read_pilot(folder)).values() for pair in task]
    if len(found) < len(folder.tasks):
        return None
    return sum(pair.baseline.passed != pair.candidate.passed for pair in found) / len(found)


def summary(folder: TrialFolder) -> Iterator[str]:
    """What the pilot shows, in lines."""
    records = read_pilot(folder)
    noise, failed = noise_of(folder), sum(record.error is not None for record in records)
    rate = sum(record.passed is True for record in records) / max(len(records), 1)
    yield f"baseline passes {rate:.1%} of {len(records)} requests; {failed} failed"
    if noise is not None:
        yield f"noise: {noise:.1%} of the tasks flip between two runs of the same model"
