"""Side-by-side timing: the arms take turns within one process, so that what else the machine does hits all of them alike.

A *sample* is enough calls of one arm to fill a minimum of time; a *round* is one sample of every arm, forwards in even
rounds and backwards in odd ones, so that neither a drift nor the neighbour's leftovers in the caches favour one arm.
Medians and quartiles are over rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Arm", "Timing", "interleave"]

#: Rounds that are run even where the time is up.
FEWEST = 3


@dataclass(frozen=True)
class Arm:
    """What one side does.

    Arguments:
        name: for messages.
        calls: called in turn, for ever; several so that each touches other memory (a rotation larger than the caches).
    """

    name: str
    calls: Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one number a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The borders of the middle half of the rounds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def interleave(
    arms: Sequence[Arm],
    *,
    repeats: int,
    minimum: float = 0.004,
    limit: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Time the arms in turns; the first call of everything is warm-up.

    Arguments:
        repeats: rounds.
        minimum: seconds that a sample should last.
        limit: seconds after which no round is begun, once there are three.
    Returns:
        One Timing an arm, in order.
    """
    rotations = [_Rotation(arm, minimum, clock) for arm in arms]
    samples: list[list[float]] = [[] for _ in arms]
    begin = clock()
    for turn in range(repeats):
        if turn >= min(FEWEST, repeats) and clock() - begin > limit:
            break
        order = range(len(arms)) if turn % 2 == 0 else reversed(range(len(arms)))
        for i in order:
            samples[i].append(rotations[i].sample())
    return [Timing(tuple(found)) for found in samples]


class _Rotation:
    """An arm, its place in the rotation, and how many calls make a sample. Making it is the warm-up."""

    def __init__(self, arm: Arm, minimum: float, clock: Callable[[], float]) -> None:
        self.calls, self.clock, self.place, self.count = arm.calls, clock, 0, 1
        for call in arm.calls:
            call()
        begin = clock()
        self._run(1)
        once = clock() - begin
        self.count = 1 if once <= 0 else max(1, min(math.ceil(minimum / once), 10_000))

    def sample(self) -> float:
        begin = self.clock()
        self._run(self.count)
        return (self.clock() - begin) / self.count

    def _run(self, count: int) -> None:
        for _ in range(count):
            self.calls[self.place]()
            self.place = (self.place + 1) % len(self.calls)
