"""The material of a report, made by hand: two arms over a few tasks, with outcomes that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.trial.integrity import Finding
from halfbyte.trial.outcome import EXIT_CODES, Check, Decision, Verdict
from halfbyte.trial.records import Arm, ArmUsage, Phase, Record
from halfbyte.trial.report.material import Material
from halfbyte.trial.review import Note
from halfbyte.trial.settings import Settings
from halfbyte.trial.tasks import Task

MIB = 2**20


def record(
    task: str, arm: Arm, *, repeat: int = 0, passed: bool | None = True, text: str = "42", **changes: Any
) -> Record:
    values: dict[str, Any] = {
        "phase": "run",
        "block": 0,
        "position": 0,
        "arm": arm,
        "task": task,
        "repeat": repeat,
        "seed": repeat,
        "started": 1000.0,
        "ttft": 0.1,
        "latency": 0.5,
        "prompt_tokens": 20,
        "completion_tokens": 10,
        "cached_tokens": 0,
        "finish_reason": "stop",
        "text": text,
        "calls": "",
        "tool_calls": None,
        "passed": passed,
        "score": None if passed is None else float(passed),
        "error": None,
        "attempts": 1,
        "request_sha256": "0" * 64,
        "response_sha256": "0" * 64,
    }
    return Record(**{**values, **changes})


def pair(
    task: str,
    before: bool | None,
    after: bool | None,
    *,
    texts: tuple[str, str] = ("42", "42"),
    phase: Phase = "run",
    repeat: int = 0,
    **changes: Any,
) -> list[Record]:
    """Both arms' records of one repeat."""
    return [
        record(task, "baseline", passed=before, text=texts[0], phase=phase, repeat=repeat, **changes),
        record(task, "candidate", passed=after, text=texts[1], phase=phase, repeat=repeat, **changes),
    ]


def task(name: str, *, prompt: str = "What is 6 times 7?", expected: Any = "42", **changes: Any) -> Task:
    return Task.model_validate(
        {"id": name, "prompt": prompt, "scorer": {"type": "contains"}, "expected": expected, **changes}
    )


def check(name: str = "pass_rate", **changes: Any) -> Check:
    values: dict[str, Any] = {
        "name": name,
        "unit": "points",
        "sense": "more than",
        "estimate": -0.01,
        "low": -0.04,
        "high": 0.02,
        "limit": -0.05,
        "ok": True,
        "note": "a note",
        "details": {},
    }
    return Check(**{**values, **changes})


def decision(
    verdict: Verdict = "keep", *checks: Check, more: int | None = None, reasons: Sequence[str] = ()
) -> Decision:
    return Decision(verdict, EXIT_CODES[verdict], checks or (check(),), more, tuple(reasons))


def usage(arm: Arm, peak: int | None = 500, source: str = "engine metrics + PSS") -> ArmUsage:
    """Sizes in MiB; None for a remote server."""
    if peak is None:
        return ArmUsage(arm, 10.0, None, None, None, None, source)
    return ArmUsage(arm, 10.0, peak // 2 * MIB, 100 * MIB, peak * MIB, 4096, source)


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "trial": {"name": "small trial"},
        "baseline": {"url": "http://127.0.0.1:1/v1", "precision": "bf16"},
        "candidate": {"url": "http://127.0.0.1:2/v1", "precision": "w4a4kv4"},
        "limits": {"margin": 0.05, "benefit": "peak_memory", "benefit_min": 0.3},
        "cost": {"machine_per_hour": 3.6, "setup_hours": 2, "engineer_per_hour": 50, "requests_per_month": 1e6},
    }
    return Settings.model_validate({**values, **changes})


def material(
    records: Sequence[Record] | None = None,
    *,
    tasks: Sequence[Task] | None = None,
    pilot: Sequence[Record] = (),
    found: Decision | None = None,
    used: Mapping[Arm, ArmUsage] | None = None,
    integrity: Sequence[Finding] = (),
    environment: Mapping[str, Any] | None = None,
    given: Settings | None = None,
    notes: Sequence[Note] = (),
) -> Material:
    records = pair("a", True, True) if records is None else records
    names = dict.fromkeys(r.task for r in records)
    return Material(
        decision=decision() if found is None else found,
        records=records,
        pilot=pilot,
        tasks=[task(name) for name in names] if tasks is None else tasks,
        settings=settings() if given is None else given,
        usage={"baseline": usage("baseline"), "candidate": usage("candidate", 300)} if used is None else used,
        integrity=integrity,
        environment={"python": "3.12"} if environment is None else environment,
        notes=notes,
    )
