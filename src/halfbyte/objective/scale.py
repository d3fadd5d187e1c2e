"""The size of healthy gaps in a batch, hardly moved by damage."""

from __future__ import annotations

from torch import Tensor

__all__ = ["gap_scale"]

# Lower quartile of |x| for a standard normal x.
_QUARTILE = 0.3186


def gap_scale(gap: Tensor, floor: float) -> float:
    """Lower quartile of |g| over .3186: the standard deviation, were all gaps normal; at least ``floor``.

    Up to three quarters of the tokens may be damaged before it follows them. The floor is for models that are sure of most
    tokens, whose gaps are then next to nothing.

    Arguments:
        gap: [N] float32, tokens that count. floor: nats > 0.
    """
    if gap.numel() == 0:
        return floor
    return max(float(gap.abs().kthvalue((gap.shape[0] + 3) // 4).values) / _QUARTILE, floor)
