"""Counterbalanced blocks: ABBA, BAAB, ABBA ... so that drift, warm caches and time of day fall on both arms alike.

A *segment* is a chunk of tasks sent to one arm. A pair is the same chunk in both arms, one after the other. A block is two
pairs, of two chunks, in mirrored order: no chunk follows itself within an arm, where a prefix cache would still hold it
(vLLM #54227, #52884).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.trial.records import Arm

__all__ = ["Block", "Segment", "Slot", "make_schedule"]

#: Blocks that a bootstrap over blocks should have at least.
_BLOCKS = 8
_ORDERS: tuple[tuple[Arm, Arm], tuple[Arm, Arm]] = (("baseline", "candidate"), ("candidate", "baseline"))


@dataclass(frozen=True)
class Slot:
    """One request to be sent."""

    block: int
    position: int
    arm: Arm
    task: str
    repeat: int


@dataclass(frozen=True)
class Segment:
    """Requests to one arm, in the order in which they are sent."""

    arm: Arm
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Block:
    """Segments in order; ``order`` spells them, A the baseline (``ABBA``)."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def order(self) -> str:
        """Such as ``ABBA``."""
        return "".join("A" if segment.arm == "baseline" else "B" for segment in self.segments)

    def slots(self) -> Iterator[Slot]:
        """All requests, by position."""
        for segment in self.segments:
            yield from segment.slots


def make_schedule(tasks: Sequence[str], repeats: int, block_tasks: int, seed: int) -> tuple[Block, ...]:
    """The blocks of a trial, a pure function of its arguments.

    Arguments:
        tasks: ids; every repeat shuffles them by a hash of seed, repeat and id, and cuts them into chunks of equal size.
        block_tasks: largest chunk; 0 cuts so that there are 8 blocks where the tasks allow.
    """
    pairs = [
        (chunk, repeat) for repeat in range(repeats) for chunk in _chunks(tasks, repeats, block_tasks, seed, repeat)
    ]
    blocks = []
    for number, start in enumerate(range(0, len(pairs), 2)):
        first, second = _ORDERS[number % 2]
        segments: list[Segment] = []
        position = 0
        for (chunk, repeat), arms in zip(pairs[start : start + 2], ((first, second), (second, first))):
            for arm in arms:
                slots = tuple(Slot(number, position + i, arm, task, repeat) for i, task in enumerate(chunk))
                segments.append(Segment(arm, slots))
                position += len(chunk)
        blocks.append(Block(number, tuple(segments)))
    return tuple(blocks)


def _chunks(tasks: Sequence[str], repeats: int, block_tasks: int, seed: int, repeat: int) -> Iterator[tuple[str, ...]]:
    shuffled = sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}\n{repeat}\n{task}".encode()).digest())
    count = -(-len(tasks) // block_tasks) if block_tasks else -(-2 * _BLOCKS // repeats)
    if count * repeats % 2:  # an odd number of pairs leaves a block of two segments, which balances nothing
        count += 1
    count = min(count, len(tasks))
    for i in range(count):
        yield tuple(shuffled[i * len(tasks) // count : (i + 1) * len(tasks) // count])
