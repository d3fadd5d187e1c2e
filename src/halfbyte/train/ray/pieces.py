"""A step's samples cut into pieces that any worker can play: a sample is the same wherever it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "cut"]


@dataclass(frozen=True)
class Piece:
    """Some samples of one prompt.

    Arguments:
        group: the prompt's place in the step.
        first, count: its samples [first, first + count).
        tokens: how many it may take; what workers' loads are counted in.
        job: the job's number.
    """

    group: int
    first: int
    count: int
    tokens: int
    job: int = 0

    def samples(self) -> list[tuple[int, int]]:
        """(group, sample) of each of its samples."""
        return [(self.group, i) for i in range(self.first, self.first + self.count)]


def cut(prompt_tokens: Sequence[int], samples: int, max_tokens: int, workers: int, job: int = 0) -> list[Piece]:
    """Whole groups, whose prompt is then computed once, as long as there are two for each worker; parts of groups otherwise.

    Arguments:
        prompt_tokens: length of each prompt. samples: of each. max_tokens: of a response.
    """
    groups = len(prompt_tokens)
    parts = 1 if workers <= 1 or not groups else max(1, min(samples, -(-2 * workers // groups)))
    out = []
    for group, length in enumerate(prompt_tokens):
        first = 0
        for part in range(parts):
            count = samples // parts + (part < samples % parts)
            out.append(Piece(group, first, count, length + count * max_tokens, job))
            first += count
    return out
