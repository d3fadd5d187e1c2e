"""The delta of a tensor from the deltas of its parts, where the parts are cut between blocks: the bytes are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.codec.delta import TensorDelta

__all__ = ["joined", "whole_blocks"]


def whole_blocks(cuts: Sequence[int], elements: int, block: int) -> bool:
    """Whether a tensor of ``elements`` cut at these elements is cut between blocks only."""
    return all(cut % block == 0 or cut >= elements for cut in cuts)


def joined(parts: Sequence[TensorDelta]) -> TensorDelta:
    """The delta of the parts one behind the other.

    Raises:
        RefitError: parts of different kinds, or one that is not the last and ends within a block.
    """
    first = parts[0]
    for part in parts:
        if (part.dtype, part.block) != (first.dtype, first.block):
            raise RefitError("parts of a delta with different dtypes or blocks", where=f"{part.dtype}, {part.block}")
    if not whole_blocks(
        np.cumsum([p.elements for p in parts[:-1]]).tolist(), sum(p.elements for p in parts), first.block
    ):
        raise RefitError("a part of a delta ends within a block", expected=f"a multiple of {first.block} elements")
    return TensorDelta(
        first.dtype,
        sum(part.elements for part in parts),
        first.block,
        np.concatenate([part.table for part in parts]),
        np.concatenate([part.payload for part in parts]),
    )
