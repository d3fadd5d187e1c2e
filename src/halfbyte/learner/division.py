"""Which rank trains on which samples: by length, longest first, each to the rank with the fewest tokens so far.

A function of the lengths alone, so all ranks know it without a word. Every rank makes the same number of passes, because a
pass gathers and reduces weights together; a rank with fewer micro-batches than the others goes over one of its own (or, with
none, over the shortest sample of all) again, for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.learner.batch import micro_batches

__all__ = ["Pass", "divide", "passes"]


@dataclass(frozen=True)
class Pass:
    """One forward (and backward) pass of a rank.

    Arguments:
        samples: indices into the samples that were divided.
        counts: False for a pass that only keeps step with the other ranks.
    """

    samples: list[int]
    counts: bool = True


def divide(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The samples of each of ``size`` ranks, in order; with one rank all of them."""
    load, out = [0] * size, [list[int]() for _ in range(size)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = load.index(min(load))
        out[rank].append(index)
        load[rank] += lengths[index]
    return [sorted(part) for part in out]


def passes(lengths: Sequence[int], budget: int, *, packing: bool, rank: int = 0, size: int = 1) -> list[Pass]:
    """What ``rank`` goes over: its samples in micro-batches under ``budget`` tokens, see :func:`micro_batches`."""
    of_rank = [
        [[part[i] for i in batch] for batch in micro_batches([lengths[i] for i in part], budget, packing=packing)]
        for part in divide(lengths, size)
    ]
    own = [Pass(batch) for batch in of_rank[rank]]
    shortest = min(range(len(lengths)), key=lambda i: (lengths[i], i), default=0)
    filler = Pass([min(own[0].samples, key=lambda i: lengths[i])] if own else [shortest], counts=False)
    return own + [filler] * (max(map(len, of_rank)) - len(own))
