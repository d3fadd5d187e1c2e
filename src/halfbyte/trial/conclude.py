"""From records to a verdict: integrity first, then the decision, then outcome.json and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.files import read_object, write_object
from halfbyte.trial.artefact import artefact_folder, inspect_artefact
from halfbyte.trial.blocks import BlockRecord
from halfbyte.trial.decision import decide
from halfbyte.trial.environment import servers
from halfbyte.trial.errors import UnavailableError
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.integrity import Finding, assess, problems
from halfbyte.trial.journal import read_blocks, read_records
from halfbyte.trial.lock import genesis, has_pilot, pilot_genesis, require_lock
from halfbyte.trial.outcome import Decision
from halfbyte.trial.records import ARMS, Arm, ArmUsage, Record
from halfbyte.trial.report import Material
from halfbyte.trial.report import write as write_report
from halfbyte.trial.review import read_notes
from halfbyte.trial.usage import arm_peaks, arm_usage

__all__ = ["Outcome", "conclude", "read_pilot", "recompute"]


@dataclass(frozen=True)
class Outcome:
    """A verdict and what it rests on."""

    decision: Decision
    records: list[Record]
    blocks: list[BlockRecord]
    pilot: list[Record]
    usage: dict[Arm, ArmUsage]
    integrity: list[Finding]
    environment: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What outcome.json holds."""
        return {
            "decision": self.decision.to_json(),
            "usage": {arm: used.to_json() for arm, used in self.usage.items()},
            "integrity": [finding.to_json() for finding in self.integrity],
            "environment": self.environment,
            "records": len(self.records),
            "chain": self.blocks[-1].chain if self.blocks else None,
        }


def recompute(folder: TrialFolder) -> Outcome:
    """The outcome, from the records alone.

    Raises:
        UnavailableError: not locked, or not finished and nothing wrong so far.
        IntegrityError: something was changed after the lock, or records are not what was recorded.
    """
    lock = require_lock(folder)
    blocks = read_blocks(folder.blocks("run"), genesis(lock))
    records = read_records(folder.records("run"), blocks, genesis(lock))
    findings = [
        Finding("lock", "lock", True, "limits, tasks, settings, scorers and artefacts are those that were locked"),
        Finding("chain", "chain of records", True, f"{len(records)} records and {len(blocks)} blocks, unbroken"),
        *assess(folder, "run", records, blocks),
    ]
    wrong = problems(findings)
    schedule = folder.schedule("run")
    if len(blocks) < len(schedule) and not wrong:
        what = f"the run is not finished: {len(blocks)} of {len(schedule)} blocks"
        raise UnavailableError(what, where=str(folder.path), fix=f"halfbyte trial run {folder.path}")
    usage = arm_usage(blocks, _headers(folder))
    decision = decide(
        records,
        [task.info for task in folder.tasks],
        folder.settings.limits,
        usage,
        folder.settings.cost,
        invalid=[f"{finding.name}: {finding.detail}" for finding in wrong],
        peaks=arm_peaks(blocks),
    )
    stored = read_object(folder.path / "environment.json") or {}
    environment = stored | {"servers": servers(folder.settings, blocks)}
    preflight = [Finding.from_json(finding, "lock.json") for finding in lock["preflight"]]
    return Outcome(decision, records, blocks, read_pilot(folder), usage, [*findings, *preflight], environment)


def conclude(folder: TrialFolder) -> Outcome:
    """Recompute, and write outcome.json, report.html and report.md.

    Raises:
        UnavailableError, IntegrityError: as :func:`recompute`.
    """
    outcome = recompute(folder)
    write_object(folder.outcome, outcome.to_json())
    material = Material(
        decision=outcome.decision,
        records=outcome.records,
        pilot=outcome.pilot,
        tasks=folder.tasks,
        settings=folder.settings,
        usage=outcome.usage,
        integrity=outcome.integrity,
        environment=outcome.environment,
        notes=read_notes(folder),
    )
    write_report(folder.path, material)
    return outcome


def read_pilot(folder: TrialFolder) -> list[Record]:
    """Records of the A/A pilot; none without one of these tasks and settings."""
    if not has_pilot(folder):
        return []
    start = pilot_genesis(folder)
    return read_records(folder.records("pilot"), read_blocks(folder.blocks("pilot"), start), start)


def _headers(folder: TrialFolder) -> dict[Arm, int]:
    """Weights by the safetensors headers, where the artefact is here."""
    found: dict[Arm, int] = {}
    for arm in ARMS:
        path = artefact_folder(folder, folder.settings.target(arm))
        if path is not None:
            try:
                found[arm] = inspect_artefact(path).weights_bytes
            except (CheckpointError, OSError):  # moved since the run: its fingerprint, in the lock, has said so already
                continue
    return found
