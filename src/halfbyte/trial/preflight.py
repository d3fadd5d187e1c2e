"""check.json: what the preflight found, and what it was about, so that `lock` can ask for one that passed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from halfbyte.files import read_object, write_object
from halfbyte.trial.canonical import digest
from halfbyte.trial.errors import UnavailableError
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.integrity import Finding, problems
from halfbyte.trial.tasks import task_hashes

__all__ = ["read_preflight", "require_preflight", "write_preflight"]


def write_preflight(folder: TrialFolder, findings: Sequence[Finding]) -> None:
    """Write check.json."""
    found = [finding.to_json() for finding in findings]
    write_object(folder.path / "check.json", {"of": _subject(folder), "when": time.time(), "findings": found})


def read_preflight(folder: TrialFolder) -> list[Finding]:
    """The findings of check.json; none without one."""
    data = read_object(folder.path / "check.json") or {}
    return [Finding.from_json(finding, "check.json") for finding in data.get("findings", ())]


def require_preflight(folder: TrialFolder) -> None:
    """A preflight of these targets, tasks and settings has passed.

    Raises:
        UnavailableError: it has not, or it was about others.
    """
    data = read_object(folder.path / "check.json")
    command = f"halfbyte trial check {folder.path}"
    if data is None:
        raise UnavailableError("the preflight has not been run", where=str(folder.path), fix=command)
    if data.get("of") != _subject(folder):
        what = "targets, tasks or settings have changed since the preflight"
        raise UnavailableError(what, where=str(folder.path / "check.json"), fix=command)
    if failed := problems(read_preflight(folder)):
        shown = "; ".join(f"{finding.name}: {finding.detail}" for finding in failed)
        raise UnavailableError(f"the preflight did not pass: {shown}", fix=command)


def _subject(folder: TrialFolder) -> str:
    """Limits and prices may still be chosen after it."""
    settings = folder.settings.to_json()
    parts = {name: settings[name] for name in ("baseline", "candidate", "sampling", "run", "data")}
    return digest({**parts, "tasks": task_hashes(folder.tasks)})
