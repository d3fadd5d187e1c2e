"""``halfbyte trial``: is the lower-precision model good enough? Nine commands, one verdict in the exit code."""

from __future__ import annotations

import asyncio
import functools
import getpass
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import App, Parameter

from halfbyte.cli.parameter import flag
from halfbyte.errors import UserError

if TYPE_CHECKING:
    from halfbyte.trial.conclude import Outcome
    from halfbyte.trial.integrity import Finding

__all__ = ["make_trial"]

INVALID, UNAVAILABLE = 3, 4
Folder: TypeAlias = Annotated[Path, Parameter(help="Trial folder: where trial.toml lies.")]
Json: TypeAlias = Annotated[bool, Parameter("--json", negative="", show_default=False, help="Print one JSON object.")]


def make_trial() -> App:
    """The commands."""
    app = App(
        name="trial",
        help="Try a cheaper model against the one in use: paired, locked beforehand, one verdict.",
        help_format="plaintext",
    )
    for command in (init, check, pilot, plan, lock, run, report, review, verify):
        app.command(_coded(command), name=command.__name__)
    return app


def _coded(command: Callable[..., int]) -> Callable[..., int]:
    """Exit codes of a trial: 2 means inconclusive here, so what a user got wrong is 3 (invalid) or 4 (not available)."""

    @functools.wraps(command)
    def coded(*arguments: Any, **named: Any) -> int:
        from halfbyte.trial.errors import IntegrityError

        try:
            return command(*arguments, **named)
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return INVALID if isinstance(error, IntegrityError) else UNAVAILABLE

    return coded


def init(
    folder: Annotated[Path, Parameter(help="Folder to make.")],
    /,
    *,
    baseline: Annotated[str, Parameter(help="Model folder to serve, or the URL of a server (with its /v1).")] = "model",
    candidate: Annotated[str, Parameter(help="As --baseline.")] = "model-fp4",
) -> int:
    """Write a commented trial.toml and a few tasks to replace."""
    from halfbyte.trial.template import init as write

    for file in write(folder, baseline, candidate):
        print(file)
    return 0


def check(
    folder: Folder,
    /,
    *,
    servers: Annotated[bool, Parameter(help="Also start or reach the servers and ask them.")] = True,
    as_json: Json = False,
) -> int:
    """The preflight: exit code 4 names everything that is missing."""
    from halfbyte.trial.check import static_findings
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.hardware import this_machine
    from halfbyte.trial.integrity import problems
    from halfbyte.trial.preflight import write_preflight
    from halfbyte.trial.probe import live_findings

    trial = TrialFolder.open(folder)
    findings = static_findings(trial, this_machine())
    if servers and not problems(findings):  # a missing model or overlapping tasks need no server to be seen
        with _stoppable():
            findings += asyncio.run(live_findings(trial))
    if servers:
        write_preflight(trial, findings)
    _show(findings, as_json)
    return UNAVAILABLE if problems(findings) else 0


def pilot(
    folder: Folder,
    /,
    *,
    again: Annotated[bool, flag("Throw the earlier pilot away.")] = False,
) -> int:
    """Run the baseline against itself (A/A), every task once: how much two runs of the same model differ."""
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.pilot import prepare, summary
    from halfbyte.trial.run import execute

    trial = TrialFolder.open(folder)
    start = prepare(trial, again=again)
    with _stoppable():
        found = asyncio.run(execute(trial, "pilot", start, _say))
    if found:
        _show(found, False)
        return INVALID
    for line in summary(trial):
        print(line)
    return 0


def plan(
    folder: Folder,
    /,
    *,
    noise: Annotated[
        float | None,
        Parameter(help="Share of pairs that flip between two runs of the baseline; the pilot's by default."),
    ] = None,
    as_json: Json = False,
) -> int:
    """How many tasks the limits need, before any cost."""
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.pilot import noise_of
    from halfbyte.trial.planning import tasks_needed

    trial = TrialFolder.open(folder)
    measured = noise_of(trial) if noise is None else noise
    found = tasks_needed(trial.settings.limits, measured or 0.0, trial.settings.run.repeats)
    have = len(trial.tasks)
    if as_json:
        print(json.dumps({**found.to_json(), "have": have, "noise_measured": measured is not None}, indent=2))
        return 0
    if measured is None:
        print("no pilot yet: the noise of the baseline is taken as 0 (halfbyte trial pilot measures it)")
    for need in found.needs:
        print(
            f"{need.limit:<14} {'no number is enough' if need.tasks is None else f'{need.tasks:>6} tasks'}  {need.why}"
        )
    if found.tasks is None:
        print("the limits cannot be met by tasks: see above")
    else:
        lacks = f"{found.tasks - have} short" if have < found.tasks else "enough"
        power = "" if found.power is None else f"; power of the pass-rate limit there {found.power:.2f}"
        print(f"needed         {found.tasks:>6} tasks, {found.requests} requests an arm{power}")
        print(f"tasks.jsonl    {have:>6} tasks: {lacks}")
    for note in found.notes:
        print(f"note           {note}")
    return 0


def lock(
    folder: Folder,
    /,
    *,
    again: Annotated[bool, flag("Replace a lock that no record depends on yet.")] = False,
) -> int:
    """Fix limits, tasks, settings, scorers and artefacts. `run` refuses whatever is changed afterwards."""
    from halfbyte.trial.check import static_findings
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.hardware import this_machine
    from halfbyte.trial.integrity import problems
    from halfbyte.trial.lock import make_lock, require_unlocked
    from halfbyte.trial.preflight import require_preflight

    trial = TrialFolder.open(folder)
    require_unlocked(trial, again=again)
    if failed := problems(static_findings(trial, this_machine())):
        _show(failed, False)
        return UNAVAILABLE
    require_preflight(trial)
    make_lock(trial, again=again)
    print(f"locked: {len(trial.tasks)} tasks, limits, settings and artefacts ({trial.lock})")
    return 0


def run(folder: Folder, /) -> int:
    """Run what is missing, decide, and write the report. Killed at any moment, the same command goes on."""
    from halfbyte.files import write_object
    from halfbyte.trial.environment import environment
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.hardware import this_machine
    from halfbyte.trial.lock import genesis, require_lock
    from halfbyte.trial.run import execute

    trial = TrialFolder.open(folder)
    start = genesis(require_lock(trial))
    if not (trial.path / "environment.json").exists():
        write_object(trial.path / "environment.json", environment(this_machine()))
    with _stoppable():
        found = asyncio.run(execute(trial, "run", start, _say))
    if found:
        _say("stopped: the trial is invalid")
    return _concluded(trial)


def report(folder: Folder, /) -> int:
    """Decide and write the report again from the records."""
    from halfbyte.trial.folder import TrialFolder

    return _concluded(TrialFolder.open(folder))


def review(
    folder: Folder,
    /,
    *,
    task: Annotated[str | None, Parameter(help="Only this task; with --note, the task it is about.")] = None,
    note: Annotated[str | None, Parameter(help="Keep a note on --task. It does not change the verdict.")] = None,
    by: Annotated[str | None, Parameter(help="Who writes the note; the user by default.")] = None,
    as_json: Json = False,
) -> int:
    """List what the baseline passed and the candidate did not, side by side, and keep notes on it."""
    from halfbyte.trial.conclude import recompute
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.review import add_note, read_notes, regressions

    trial = TrialFolder.open(folder)
    if note is not None:
        add_note(trial, task or "", note, by or getpass.getuser())
    found = [r for r in regressions(trial, recompute(trial).records) if task is None or r.task == task]
    notes = [kept for kept in read_notes(trial) if task is None or kept.task == task]
    if as_json:
        rows = [
            {
                "task": r.task,
                "critical": r.critical,
                "baseline": r.baseline.to_json(),
                "candidate": r.candidate.to_json(),
            }
            for r in found
        ]
        print(json.dumps({"regressions": rows, "notes": [kept.to_json() for kept in notes]}, indent=2))
        return 0
    for regression in found:
        print(f"{regression.task}{' (critical)' if regression.critical else ''}, repeat {regression.candidate.repeat}")
        for record in (regression.baseline, regression.candidate):
            said = record.error or f"{record.text}{f' {record.calls}' if record.calls else ''}"
            print(f"  {record.arm:<10} {' '.join(said.split())[:400]!r} ({record.finish_reason})")
        for kept in notes:
            if kept.task == regression.task:
                print(f"  note       {kept.text} ({kept.by})")
    print(f"{len(found)} regressions, {len({kept.task for kept in notes})} tasks with notes")
    return 0


def verify(folder: Folder, /, *, as_json: Json = False) -> int:
    """Compute everything again from the records: chain, lock, inputs, scores, decision. Exit code 3 if anything differs."""
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.integrity import problems
    from halfbyte.trial.verify import verify as verified

    outcome, findings = verified(TrialFolder.open(folder))
    _show(findings, as_json)
    if problems(findings):
        return INVALID
    if not as_json:
        print(f"verdict        {outcome.decision.verdict}")
    return outcome.decision.exit_code


def _concluded(trial: Any) -> int:
    from halfbyte.trial.conclude import conclude

    outcome = conclude(trial)
    _verdict(outcome)
    print(trial.path / "report.html")
    return outcome.decision.exit_code


def _verdict(outcome: Outcome) -> None:
    meaning = {
        "keep": "keep the candidate",
        "retain": "retain the baseline",
        "inconclusive": "inconclusive: retain the baseline for now",
        "invalid": "invalid: these records carry no verdict",
    }
    for check in outcome.decision.checks:
        state = {True: "holds", False: "broken", None: "not shown"}[check.ok]
        low, high = ("?" if end is None else f"{end:.4g}" for end in (check.low, check.high))
        value = "?" if check.estimate is None else f"{check.estimate:.4g} ({low} to {high})"
        limit = "no limit" if check.limit is None else f"{check.sense} {check.limit:g}"
        print(f"{check.name:<16} {state:<10} {value}, {limit}")
    for reason in outcome.decision.reasons:
        print(f"because          {reason}")
    print(f"verdict          {meaning[outcome.decision.verdict]}")


def _show(findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"findings": [finding.to_json() for finding in findings]}, indent=2))
        return
    for finding in findings:
        state = {True: "ok", False: "MISSING" if finding.topic == "preflight" else "WRONG", None: "note"}[finding.ok]
        print(f"{state:<8} {finding.name:<24} {finding.detail}")
        if finding.ok is False and finding.fix:
            print(f"{'':<8} {'':<24} fix: {finding.fix}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _stoppable() -> Iterator[None]:
    """An ordinary kill stops servers and files as gently as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
