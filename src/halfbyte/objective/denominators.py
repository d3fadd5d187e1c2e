"""Denominators of the loss, fixed once a step for the whole batch.

A loss averaged inside each micro-batch is a mean of means: it changes with micro-batch size, packing and accumulation
(TRL #6024, ms-swift #10116). Here the global batch is counted first; every token then carries its own factor, and the
loss is a plain sum over tokens, however they are split.

    counts = count_batch(counted, sequence_index)                 # once a step; add the counts of other ranks
    scale = token_scale(counted, sequence_index, counts, "token_mean")
    ... one micro-batch after another: policy_loss(LossInput(..., scale=scale[part]), settings).loss.backward()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.sequences import dense_index, sequence_sum
from halfbyte.objective.validation import require_index, require_mask

__all__ = ["BatchCounts", "DenominatorMethod", "count_batch", "counted_tokens", "token_scale"]

DenominatorMethod: TypeAlias = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True)
class BatchCounts:
    """Tokens and sequences of a step; counts of several ranks add up.

    Arguments:
        tokens: tokens that count.
        sequences: sequences with at least one such token.
    """

    tokens: int
    sequences: int

    def __add__(self, other: BatchCounts) -> BatchCounts:
        """Counts of two disjoint sets of whole sequences."""
        return BatchCounts(self.tokens + other.tokens, self.sequences + other.sequences)


def counted_tokens(mask: Tensor, rejected: Tensor | None, *, count_rejected: bool) -> Tensor:
    """Mask of the tokens that enter the denominators.

    Projects disagree about tokens that a correction rejects (weight 0), so it is a choice. Counted, rejecting tokens
    makes the step smaller. Dropped, they are treated like masked ones everywhere (also for the KL and entropy terms)
    and the rest is averaged among itself.

    Arguments:
        mask: [T] bool. rejected: [T] bool or None, see ``CorrectionResult``.
        count_rejected: True keeps rejected tokens in the denominators.
    """
    require_mask("mask", mask)
    if rejected is None or count_rejected:
        return mask
    require_mask("rejected", rejected, mask.shape[0])
    return mask & ~rejected


def count_batch(counted: Tensor, sequence_index: Tensor) -> BatchCounts:
    """Count the global batch; a sequence without a counted token does not exist here.

    Arguments:
        counted: [T] bool. sequence_index: [T] int64, ids unique over the global batch.
    """
    require_mask("counted", counted)
    require_index("sequence_index", sequence_index, counted.shape[0], counted)
    return BatchCounts(int(counted.sum()), int(torch.unique(sequence_index[counted]).shape[0]))


def token_scale(
    counted: Tensor,
    sequence_index: Tensor,
    counts: BatchCounts,
    method: DenominatorMethod,
    *,
    max_tokens: int | None = None,
) -> Tensor:
    """Factor of every token in the loss sum.

    With N tokens and S sequences in the global batch and n_i tokens in sequence i:

    - ``token_mean``: 1 / N. Long responses weigh more (DAPO, arXiv 2503.14476, section 3.3).
    - ``sequence_mean``: 1 / (S n_i). Every response weighs the same (GRPO, arXiv 2402.03300, equation 3).
    - ``constant``: 1 / (S max_tokens). No length bias (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Arguments:
        counted: [T] bool, see :func:`counted_tokens`. Whole sequences: n_i is counted here.
        sequence_index: [T] int64.
        counts: of the global batch, from :func:`count_batch`.
        method: see above.
        max_tokens: the response budget, for ``constant`` only.

    Returns:
        [T] float32, 0 where not counted. Over the global batch it sums to 1 for the two means.

    Raises:
        ConfigError: unknown method, or max_tokens missing or given where it has no meaning.
        ShapeError: shapes or dtypes do not fit.
    """
    require_mask("counted", counted)
    require_index("sequence_index", sequence_index, counted.shape[0], counted)
    if method not in get_args(DenominatorMethod):
        raise ConfigError(
            f"unknown denominator {method!r}", where="denominator", expected=", ".join(get_args(DenominatorMethod))
        )
    if (method == "constant") != (max_tokens is not None) or (max_tokens is not None and max_tokens < 1):
        raise ConfigError(
            f"max_tokens is {max_tokens} with denominator {method!r}",
            where="max_tokens",
            expected="a positive integer with 'constant', None otherwise",
        )
    ones = torch.ones(int(counted.sum()), dtype=torch.float64, device=counted.device)
    if method == "token_mean":
        factor = ones / max(counts.tokens, 1)
    elif method == "sequence_mean":
        index, count = dense_index(sequence_index[counted])
        factor = ones / (sequence_sum(ones, index, count)[index] * max(counts.sequences, 1))
    else:
        factor = ones / (max(counts.sequences, 1) * (max_tokens or 1))
    return torch.zeros_like(counted, dtype=torch.float32).masked_scatter(counted, factor.float())
