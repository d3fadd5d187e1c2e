"""Everything again from the records: chain, lock, inputs, every score, the decision, compared with outcome.json."""

from __future__ import annotations

from halfbyte.files import read_object
from halfbyte.trial.canonical import canonical, digest
from halfbyte.trial.conclude import Outcome, recompute
from halfbyte.trial.errors import UnavailableError
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.integrity import Finding
from halfbyte.trial.records import Record
from halfbyte.trial.scorers import Response, make_scorers, score
from halfbyte.trial.tool_calls import parsed_calls

__all__ = ["verify"]

_SHOWN = 3


def verify(folder: TrialFolder) -> tuple[Outcome, list[Finding]]:
    """The outcome computed again, and what was compared.

    Raises:
        UnavailableError: no outcome yet, or not locked.
        IntegrityError: a broken chain, or something changed after the lock.
    """
    stored = read_object(folder.outcome)
    if stored is None:
        fix = f"halfbyte trial run {folder.path}"
        raise UnavailableError("there is no outcome to verify", where=str(folder.outcome), fix=fix)
    outcome = recompute(folder)
    findings = [*outcome.integrity, _scores(folder, outcome.records)]
    now = outcome.to_json()
    differ = [key for key in sorted(now.keys() | stored.keys()) if not _same(now.get(key), stored.get(key))]
    if differ:
        detail = f"outcome.json differs from what its records give: {', '.join(differ)}"
        findings.append(Finding("chain", "outcome", False, detail, "halfbyte trial report makes it again"))
    else:
        findings.append(Finding("chain", "outcome", True, "outcome.json is what its records give"))
    return outcome, findings


def _same(first: object, second: object) -> bool:
    return canonical(first) == canonical(second)


def _scores(folder: TrialFolder, records: list[Record]) -> Finding:
    """Every response scored again, every digest taken again."""
    scorers, tasks = make_scorers(folder.tasks, folder.path), {task.id: task for task in folder.tasks}
    wrong = []
    for record in records:
        task = tasks[record.task]
        same = record.response_sha256 == digest([record.text, record.calls, record.finish_reason])
        if record.error is None:
            response = Response(record.text, record.calls, record.finish_reason)
            verdict = score(scorers[task.id], response, task.scorer.threshold)
            calls = None if task.tools is None else len(parsed_calls(record.text, record.calls, task.tools))
            same = same and (verdict.passed, verdict.score, calls) == (record.passed, record.score, record.tool_calls)
        else:
            same = same and record.passed is None
        if not same:
            wrong.append(f"{record.task} ({record.arm}, repeat {record.repeat})")
    if wrong:
        detail = f"{len(wrong)} of {len(records)} records score otherwise now: {', '.join(wrong[:_SHOWN])}"
        return Finding("chain", "scores", False, detail, "a scorer must give the same answer for the same response")
    return Finding("chain", "scores", True, f"all {len(records)} records score as recorded")
