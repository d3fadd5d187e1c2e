"""Whose fault a failed step was.

A sample's numbers do not depend on its company, so the samples of a failed step are run again in halves until the failure
sits in a group of one. Samples that draw a token without a failure are cleared, taken out of the engine, and go on from there
when all are judged.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.rollout.engine import Engine
from halfbyte.rollout.request import Sample

__all__ = ["Probation"]


class Probation:
    """Judges samples that an engine has dropped.

    Arguments:
        engine: idle.
        samples: those of the failed step.

    Attributes:
        cleared: samples without guilt, out of the engine.
        found: whether anybody was guilty.
    """

    def __init__(self, engine: Engine, samples: Sequence[Sample]) -> None:
        self.engine = engine
        self.cleared: list[Sample] = []
        self.found = False
        self._groups: list[list[Sample]] = []
        self._current = list(samples)
        self._lengths: dict[int, int] = {}

    def advance(self) -> bool:
        """Clear the group that is in the engine and put the next one there; False when all are judged."""
        waiting = [sample for sample in self._current if sample.finish is None]
        self.engine.withdraw(waiting)
        self.cleared += waiting
        self._current = []
        while self._groups and not self._current:
            self._current = self._groups.pop()
        self._lengths = {sample.order: len(sample.tokens) for sample in self._current}
        self.engine.restore(self._current)
        return bool(self._current)

    def passed(self) -> bool:
        """Whether every sample of the group has drawn a token since it was put there."""
        return all(len(sample.tokens) > self._lengths.get(sample.order, -1) for sample in self._current)

    def failed(self) -> Sample | None:
        """The group's step has failed and the engine is empty: the guilty sample of a group of one, or None."""
        group, self._current = [sample for sample in self._current if sample.finish is None], []
        if len(group) == 1:
            self.found = True
            return group[0]
        middle = len(group) // 2
        self._groups += [half for half in (group[middle:], group[:middle]) if half]
        return None

    def forget(self, group: int) -> None:
        """A request is over; its samples are out of the engine already."""
        for samples in (self._current, self.cleared, *self._groups):
            samples[:] = [sample for sample in samples if sample.request.group != group]
