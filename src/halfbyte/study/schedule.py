"""Run a study: what is missing, in a pool, with its results written anew after every run. Killed anywhere, it goes on.

A run is finished when the file that is written last is there; such a run is never touched again. The others go on from their
newest checkpoint. The plan is kept beside the results; a later plan may add arms, seeds and axis values, and what changed after
how many runs is on record.
"""

from __future__ import annotations

import fcntl
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.config import difference
from halfbyte.errors import ConfigError
from halfbyte.files import read_object, write_object
from halfbyte.study.analysis import analyse
from halfbyte.study.plan import Job, Plan
from halfbyte.study.pool import Command, environment_of, run_pool
from halfbyte.study.records import RunRecord, read_run

__all__ = ["Outcome", "group_of", "results", "run_study", "unfinished"]

#: Keys that may differ between a run and the plan that goes on with it.
FREE = ("train.out", "train.checkpoint_every", "train.keep_checkpoints", "alignment.memory_mb")
#: Exit codes of a run that was asked to stop: with a checkpoint, or before it could write one.
STOPPED = (130, -signal.SIGTERM)
#: Lines of a failed run's log that are shown.
LOG_LINES = 8

Pool = Callable[..., bool]


@dataclass
class Outcome:
    """How a call of :func:`run_study` ended.

    Arguments:
        complete: nothing is missing.
        stopped: interrupted.
        failed: label of a run -> exit code and the last lines of its log.
    """

    complete: bool
    stopped: bool
    failed: dict[str, str] = field(default_factory=dict)


def run_study(
    plan: Plan,
    *,
    say: Callable[[str], None],
    publish: Callable[[dict[str, Any]], None],
    watch: Callable[[Sequence[Job], int, int], None] = lambda running, done, total: None,
    pool: Pool = run_pool,
) -> Outcome:
    """Do what is missing of a plan.

    Arguments:
        say: takes a line for every run that ends.
        publish: takes the results (the content of ``study.json``) at the start, after every run and at the end.
        watch: takes the runs in work, runs done and runs planned, several times a second.
        pool: runs the processes.

    Raises:
        ConfigError: another process runs this study, or a run in the folder has another configuration.
    """
    jobs = plan.jobs()
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _locked(plan.folder):
        _refuse_other_runs(jobs)
        _record_plan(plan, sum(not unfinished(job, plan) for job in jobs))
        missing = [job for job in jobs if unfinished(job, plan)]
        done = len(jobs) - len(missing)
        if done:
            say(f"{done} of {len(jobs)} runs are finished already")
        outcome = Outcome(complete=False, stopped=False)
        by_name = {str(job.folder): job for job in missing}
        # A record of a finished run does not change: read once.
        finished: dict[Path, RunRecord] = {}

        def ended(name: str, code: int) -> None:
            nonlocal done
            job = by_name[name]
            if code == 0 and not unfinished(job, plan):
                done += 1
                say(f"[{done}/{len(jobs)}] {job.label}: {_result(job)}")
            elif code not in STOPPED:
                outcome.failed[job.label] = f"exit code {code}; {_tail(job.folder / 'log.txt')}"
                say(f"{job.label} failed: {outcome.failed[job.label]}")
            publish(results(plan, finished))

        publish(results(plan, finished))
        whole = pool(
            (_command(job, plan) for job in missing),
            processes=plan.section.processes,
            environ=environment_of(plan.section.threads),
            ended=ended,
            tick=lambda names: watch([by_name[name] for name in names], done, len(jobs)),
        )
        outcome.stopped = not whole
        outcome.complete = done == len(jobs)
        publish(results(plan, finished))
        return outcome


def unfinished(job: Job, plan: Plan) -> bool:
    """Whether anything is left to do: the last file of a run, with an accuracy for every precision asked for."""
    if (job.folder / "outcome.json").is_file():
        return False
    deployed = read_object(job.folder / "deployed.json")
    return deployed is None or not set(plan.section.deployed) <= deployed.keys()


def results(plan: Plan, cache: dict[Path, RunRecord] | None = None) -> dict[str, Any]:
    """The content of ``study.json``, from what lies in the folder now."""
    kept = {} if cache is None else cache
    records = []
    jobs = plan.jobs()
    for job in jobs:
        record = kept.get(job.folder)
        if record is None and (job.folder / "metrics.jsonl").is_file():
            record = read_run(job.folder)
            if record.finished and not unfinished(job, plan):
                kept[job.folder] = record
        if record is not None:
            records.append(record)
    history = (read_object(plan.folder / "plan.json") or {}).get("history", [])
    found = analyse(records, reference=plan.section.reference, arms=plan.arms, planned=len(jobs))
    sources = {str(job.folder): job.folder.relative_to(plan.folder).as_posix() for job in jobs}
    for run in found["runs"]:
        run["source"] = sources[run["source"]]
    return {**found, "plan": plan.to_json(), "history": history}


def group_of(plan: Plan, job: Job) -> str:
    """Name of the group of runs that are compared: the study and the values of its axes."""
    values = [f"{key} = {value}" for key, value in job.point.items()]
    return ", ".join([plan.section.name, *values])


def _command(job: Job, plan: Plan) -> Command:
    """Writes what the worker needs, when its turn comes."""
    job.folder.mkdir(parents=True, exist_ok=True)
    write_object(job.folder / "label.json", {"arm": job.arm, "seed": job.seed, "group": group_of(plan, job)})
    task = {
        "config": job.config.to_json(),
        "deployed": list(plan.section.deployed),
        "keep_checkpoints": plan.section.keep_checkpoints,
    }
    write_object(job.folder / "task.json", task)
    arguments = [sys.executable, "-m", "halfbyte.study.worker", str(job.folder)]
    return Command(str(job.folder), arguments, job.folder / "log.txt")


def _refuse_other_runs(jobs: Sequence[Job]) -> None:
    for job in jobs:
        old = read_object(job.folder / "config.json")
        if old is None:
            continue
        changed = [line for line in difference(old, job.config) if line.split(":")[0].strip() not in FREE]
        if changed:
            raise ConfigError(
                f"the run of {job.label} has another configuration: {'; '.join(changed)}",
                where=str(job.folder),
                expected="the study that was started here, with more arms, seeds or axis values at most",
                fix="undo the change, or give --out another folder",
            )


def _record_plan(plan: Plan, finished: int) -> None:
    """Keep every plan that this folder has seen, with the number of runs that were finished when it came."""
    path = plan.folder / "plan.json"
    history = list((read_object(path) or {}).get("history", []))
    if not history or history[-1]["digest"] != plan.digest():
        history.append({"digest": plan.digest(), "finished_runs": finished, "plan": plan.to_json()})
        write_object(path, {"history": history})


def _result(job: Job) -> str:
    record = read_run(job.folder)
    if record.status == "broken":
        return f"broken at step {record.steps}: {record.note.splitlines()[0] if record.note else ''}"
    seconds = sum(record.seconds.values())
    served = ", ".join(f"{value:.3f} in {name}" for name, value in record.deployed.items())
    return f"accuracy {record.final:.3f} ({served}), {seconds:.0f} s"


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    return f"{path}:\n  " + "\n  ".join(lines[-LOG_LINES:])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                "another process runs this study", where=str(folder), fix="wait for it, or use --out"
            ) from error
        yield
