"""What a running study shows: a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from halfbyte.study.plan import Job

__all__ = ["StudyProgress"]


class StudyProgress:
    """Context manager that shows finished runs, and the steps of those in work.

    Arguments:
        jobs: all runs of the study.
        every: seconds between plain lines when the output is not a terminal.
    """

    def __init__(self, jobs: Sequence[Job], every: float = 60.0) -> None:
        self._console = Console(file=sys.stderr)
        self._total, self._every = len(jobs), every
        self._last = self._looked = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> StudyProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("runs"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("study", total=self._total, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def watch(self, running: Sequence[Job], done: int, total: int) -> None:
        """Look at the runs in work, at most once a second."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        self._looked = now
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, note=_note(running))
        elif now - self._last >= self._every:
            self._last = now
            self.say(f"[{done}/{total}] running: {_note(running)}")


def _note(running: Sequence[Job]) -> str:
    return "; ".join(f"{job.label} {_steps(job)}/{job.config.train.steps}" for job in running)


def _steps(job: Job) -> int:
    """Lines of training metrics so far: one a step."""
    try:
        text = (job.folder / "metrics.jsonl").read_bytes()
    except OSError:
        return 0
    return text.count(b'"kind": "train"')
