"""Sums over the sequences of a flat batch.

Tokens are flat: one tensor [T] for the whole batch and ``sequence_index`` [T] says which sample a token belongs to. Ids
need not be dense or sorted, and the tokens of a sample need not be neighbours, so padding, packing and order never
matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.objective.validation import require_index

__all__ = ["dense_index", "sequence_sum", "spread"]


def dense_index(sequence_index: Tensor) -> tuple[Tensor, int]:
    """Rename the ids that occur to 0..n-1.

    Arguments:
        sequence_index: [T] int64.

    Returns:
        index [T] int64 and n. Ids that do not occur (samples without a single token that counts) get no row, so nothing
        later can divide by their zero length.
    """
    ids, index = torch.unique(sequence_index, return_inverse=True)
    return index, int(ids.shape[0])


def sequence_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum values over each sequence; differentiable.

    Arguments:
        values: [T] float.
        index: [T] int64 in 0..count-1, see :func:`dense_index`.
        count: number of sequences.

    Returns:
        [count] of the dtype of values, accumulated in float64 and rounded once: the order of tokens does not show.
    """
    total = torch.zeros(count, dtype=torch.float64, device=values.device)
    return total.index_add(0, index, values.double()).to(values.dtype)


def spread(per_sample: Tensor, sequence_index: Tensor) -> Tensor:
    """Give every token the value of its sample.

    Arguments:
        per_sample: [N] any dtype, for example advantages or rewards.
        sequence_index: [T] int64 in 0..N-1, or -1 for tokens of no sample (padding).

    Returns:
        [T], 0 (False) where the index is -1.

    Raises:
        ShapeError: an index is below -1 or not below N.
    """
    require_index("sequence_index", sequence_index, sequence_index.shape[0], sequence_index != -1)
    if sequence_index.numel() and int(sequence_index.max()) >= per_sample.shape[0]:
        raise ShapeError(
            f"sequence_index reaches {int(sequence_index.max())} but there are {per_sample.shape[0]} samples",
            where="spread",
            expected="every index below the number of samples",
        )
    padding = sequence_index < 0
    # One extra zero sample takes the padding, so that an empty batch of samples works too.
    extended = torch.cat([per_sample, per_sample.new_zeros(1)])
    return extended[torch.where(padding, per_sample.shape[0], sequence_index)]
