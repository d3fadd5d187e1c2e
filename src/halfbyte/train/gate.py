"""Whose turn it is at an engine: a worker that passes again and again, and holders that wait for a pass to end.

A plain lock would do but for its unfairness: the worker would take it back before a holder had woken up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class Gate:
    """One worker, any number of holders.

    Attributes:
        changed: the condition that guards what worker and holders share; notify it of every change.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._holders = 0
        self._inside = False
        self._idle = 0.0
        self._idle_from: float | None = time.perf_counter()

    def enter(self, closed: Callable[[], bool], work: Callable[[], bool]) -> bool:
        """The worker begins a pass: waits until there is work and nobody holds. False once it is closed."""
        with self.changed:
            while not closed():
                if self._holders == 0 and work():
                    self._settle()
                    self._inside = True
                    return True
                if self._idle_from is None and not work():
                    self._idle_from = time.perf_counter()
                self.changed.wait()
            return False

    def leave(self) -> None:
        """The worker has ended its pass."""
        with self.changed:
            self._inside = False
            self.changed.notify_all()

    def hold(self) -> None:
        """Keep the worker out, from the end of its pass on, until :meth:`release`."""
        with self.changed:
            self._holders += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._inside)

    def release(self) -> None:
        """Let the worker go on."""
        with self.changed:
            self._holders -= 1
            self.changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """:meth:`hold` for as long as the context lasts."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def idle_seconds(self) -> float:
        """Seconds since the last call in which the worker had no work; being held does not count."""
        with self.changed:
            waiting = self._idle_from is not None
            self._settle()
            if waiting:
                self._idle_from = time.perf_counter()
            seconds, self._idle = self._idle, 0.0
            return seconds

    def _settle(self) -> None:
        if self._idle_from is not None:
            self._idle += time.perf_counter() - self._idle_from
            self._idle_from = None
