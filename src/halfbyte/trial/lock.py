"""The lock: limits, tasks, settings, scorers' sources and targets as digests, fixed before the run.

A run starts its chain of digests from the lock's, so a lock that is changed afterwards, together with what it locks, breaks
the chain as well. What a lock cannot show is a trial that was run, thrown away, and run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from halfbyte import __version__
from halfbyte.files import read_object, write_object
from halfbyte.trial.artefact import artefact_folder
from halfbyte.trial.canonical import digest
from halfbyte.trial.errors import IntegrityError, UnavailableError
from halfbyte.trial.fingerprint import fingerprint
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.journal import read_blocks
from halfbyte.trial.preflight import read_preflight
from halfbyte.trial.records import ARMS
from halfbyte.trial.scorers import source_hashes
from halfbyte.trial.tasks import task_hashes

__all__ = [
    "changes",
    "genesis",
    "has_pilot",
    "make_lock",
    "pilot_genesis",
    "read_lock",
    "require_lock",
    "require_unlocked",
]


def make_lock(folder: TrialFolder, *, again: bool = False) -> dict[str, Any]:
    """Write lock.json; returns what it holds.

    Arguments:
        again: replace a lock that no record depends on yet.

    Raises:
        IntegrityError: records of a run exist, or a lock does and ``again`` was not given.
    """
    require_unlocked(folder, again=again)
    lock = {
        "created": time.time(),
        "halfbyte": __version__,
        "parts": _parts(folder),
        "preflight": [finding.to_json() for finding in read_preflight(folder)],
        "settings": folder.settings.to_json(),
    }
    write_object(folder.lock, lock)
    return lock


def require_unlocked(folder: TrialFolder, *, again: bool = False) -> None:
    """A lock may be made: nothing depends on an earlier one.

    Raises:
        IntegrityError: as :func:`make_lock`.
    """
    records = folder.records("run")
    if records.exists() and records.stat().st_size:
        raise IntegrityError(
            "the trial has records already, and its limits were chosen before them",
            where=str(records),
            fix="start a new trial folder for other limits, tasks or settings",
        )
    if folder.lock.exists() and not again:
        raise IntegrityError("the trial is locked already", where=str(folder.lock), fix="--again replaces the lock")


def read_lock(folder: TrialFolder) -> dict[str, Any]:
    """What lock.json holds.

    Raises:
        UnavailableError: there is none.
        IntegrityError: it is damaged.
    """
    if not folder.lock.exists():
        raise UnavailableError(
            "the trial is not locked", where=str(folder.lock), fix=f"halfbyte trial lock {folder.path}"
        )
    lock = read_object(folder.lock)
    if lock is None or not isinstance(lock.get("parts"), dict) or not {"created", "preflight"} <= lock.keys():
        raise IntegrityError("the lock is damaged", where=str(folder.lock))
    return lock


def require_lock(folder: TrialFolder) -> dict[str, Any]:
    """The lock, which fits what the files say now.

    Raises:
        UnavailableError: there is none.
        IntegrityError: something was changed after it; all changes are named.
    """
    lock = read_lock(folder)
    if found := changes(lock, folder):
        raise IntegrityError(
            f"changed after the lock: {'; '.join(found)}",
            where=str(folder.lock),
            expected="what was locked before the run",
            fix="undo the change; or, for other limits, tasks or settings, start a new trial folder",
        )
    return lock


def changes(lock: Mapping[str, Any], folder: TrialFolder) -> list[str]:
    """What differs between a lock and the files now, in words."""
    locked, now = lock["parts"], _parts(folder)
    found = []
    for part in sorted(locked.keys() | now.keys()):
        before, after = locked.get(part), now.get(part)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            found.append(f"{part} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
        else:
            found.append(part)
    return found


def genesis(lock: Mapping[str, Any]) -> str:
    """Where the chain of a run starts."""
    return digest({name: lock[name] for name in ("created", "parts", "preflight")})


def pilot_genesis(folder: TrialFolder) -> str:
    """Where the chain of a pilot starts: what its records depend on. Limits and prices may still be chosen after it."""
    settings = folder.settings.to_json()
    parts = {name: settings[name] for name in ("baseline", "sampling", "run")}
    return digest({"phase": "pilot", **parts, "tasks": task_hashes(folder.tasks)})


def has_pilot(folder: TrialFolder) -> bool:
    """There is a pilot, of this baseline, these tasks and settings; one of others counts for nothing."""
    note = read_object(folder.path / "pilot.json")
    return note is not None and note.get("genesis") == pilot_genesis(folder)


def _parts(folder: TrialFolder) -> dict[str, Any]:
    settings = folder.settings.to_json()
    parts: dict[str, Any] = {f"[{name}]": digest(value) for name, value in settings.items()}
    parts["tasks"] = task_hashes(folder.tasks)
    parts["scorers"] = source_hashes(folder.tasks, folder.path)
    parts["tuning data"] = {path.name: digest(path.read_bytes()) for path in folder.tuning_files() if path.is_file()}
    artefacts = {}
    for arm in ARMS:
        path = artefact_folder(folder, folder.settings.target(arm))
        artefacts[arm] = fingerprint(path) if path is not None and path.is_dir() else None
    parts["artefact of"] = artefacts
    pilot = read_blocks(folder.blocks("pilot"), pilot_genesis(folder)) if has_pilot(folder) else []
    parts["pilot"] = pilot[-1].chain if pilot else None
    return parts
