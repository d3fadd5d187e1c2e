"""Importance ratios pi(token) / base(token), per token or per sequence."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.exponent import clamped_exp
from halfbyte.objective.sequences import dense_index, sequence_sum
from halfbyte.objective.validation import require_index, require_mask, require_real

__all__ = ["RatioLevel", "importance_ratio", "log_ratio"]

RatioLevel: TypeAlias = Literal["token", "sequence_sum", "sequence_mean"]


def log_ratio(logp: Tensor, base_logp: Tensor, mask: Tensor, sequence_index: Tensor, level: RatioLevel) -> Tensor:
    """Log of the importance ratio of each token.

    - ``token``: logp - base_logp.
    - ``sequence_sum``: its sum over the sequence: the log of the exact ratio of two responses. Its spread grows with
      length, so clipped or capped means of it shrink as responses grow (TRL #5814).
    - ``sequence_mean``: its mean over the sequence: the log of the geometric mean ratio, as in GSPO (Zheng et al.,
      arXiv 2507.18071, section 4.1); comparable between lengths.

    Arguments:
        logp: [T] float32, may require gradients. base_logp: [T] float32, taken as a constant.
        mask: [T] bool, response tokens that count. sequence_index: [T] int64. The sequence levels need whole sequences:
            a micro-batch must not cut one.
        level: see above.

    Returns:
        [T]; tokens of a sequence share one value at the sequence levels; 0 where mask is false, whatever stands there,
        with zero gradient.

    Raises:
        ShapeError, ConfigError: the arguments do not fit.
    """
    length = logp.shape[0] if logp.dim() else 0
    require_mask("mask", mask, length)
    for name, values in (("logp", logp), ("base_logp", base_logp)):
        require_real(name, values, length)
    require_index("sequence_index", sequence_index, length, mask)
    if level not in get_args(RatioLevel):
        raise ConfigError(f"unknown ratio level {level!r}", where="ratio", expected=", ".join(get_args(RatioLevel)))
    # Real tokens are picked before the subtraction, so a NaN elsewhere reaches neither the value nor the gradient.
    difference = logp[mask] - base_logp.detach()[mask]
    if level != "token":
        index, count = dense_index(sequence_index[mask])
        total = sequence_sum(difference, index, count)
        if level == "sequence_mean":
            total = total / sequence_sum(torch.ones_like(difference), index, count)
        difference = total[index]
    return torch.zeros_like(logp).masked_scatter(mask, difference)


def importance_ratio(
    logp: Tensor, base_logp: Tensor, mask: Tensor, sequence_index: Tensor, level: RatioLevel
) -> Tensor:
    """exp of :func:`log_ratio`, exponent clamped; never decreasing in the gap.

    Returns:
        [T] of the dtype of logp; 0 where mask is false, so that a fully masked sequence has no ratio rather than ratio
        1 (the fault of TRL #6095).
    """
    ratio = clamped_exp(log_ratio(logp, base_logp, mask, sequence_index, level))
    return torch.where(mask, ratio, 0.0)
