"""Progress: a rich bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["RunProgress"]


class RunProgress:
    """Context manager that shows training steps.

    Arguments:
        total: number of steps.
        start: steps already done (after a resume).
        every: seconds between plain lines when the output is not a terminal.
        quiet: show nothing.
    """

    def __init__(self, total: int, start: int, every: float = 10.0, *, quiet: bool = False) -> None:
        self._console = Console(file=sys.stderr, quiet=quiet)
        self._total, self._start, self._every, self._last = total, start, every, 0.0
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("train", total=self._total, completed=self._start, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False)

    def step(self, done: int, note: str) -> None:
        """Step ``done`` has ended."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif done == self._total or time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            self.say(f"step {done}/{self._total}  {note}")
