"""One exponential for the whole objective: its argument is clamped, so it is finite and monotone everywhere.

A ratio that overflows turns into ``inf`` and, after the usual repair with ``nan_to_num(posinf=0)``, into a jump: the
largest mismatch gets the smallest weight (reported for NeMo RL). A clamp keeps the order of any two gaps.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EXPONENT_LIMIT", "clamped_exp"]

EXPONENT_LIMIT = 20.0
"""Largest |log-ratio| (nats) that is told apart; exp(20) = 4.9e8 is far outside any clip range."""


def clamped_exp(x: Tensor) -> Tensor:
    """``exp`` of x clamped to [-EXPONENT_LIMIT, EXPONENT_LIMIT].

    Arguments:
        x: any shape, float32 or float64, nats; infinities are allowed, NaN is passed on.

    Returns:
        same shape and dtype; never decreasing in x; exactly 1 at x = 0. Beyond the limit the value is constant, so its
        gradient is zero there.
    """
    return torch.exp(torch.clamp(x, -EXPONENT_LIMIT, EXPONENT_LIMIT))
