"""Which prompt comes at which place of a run: a pure function of (seed, position), so a resumed run sees the same ones."""

from __future__ import annotations

import numpy as np

__all__ = ["prompt_index"]


def prompt_index(position: int, size: int | None, seed: int) -> int:
    """Index of the ``position``-th training prompt.

    An endless environment (``size`` None) is walked in order from an offset of its own for each seed; a finite one is
    shuffled anew for every pass over it.
    """
    if size is None:
        return seed * 1_000_000_007 % 2**40 + position
    epoch, offset = divmod(position, size)
    return int(np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)[offset])
