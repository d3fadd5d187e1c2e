"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.kernels.reference.sums import lane_sum

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the rows of x [..., D] (float32) and scale them by ``weight`` [D] (float32).

    Sum of squares in float64 (products exact) in the order of :func:`~halfbyte.kernels.reference.sums.lane_sum`;
    inv = float32(1 / sqrt(sum / D + eps)); y = (x * inv) * weight.
    Raises: ShapeError when the last dimension is not D.
    """
    if weight.ndim != 1 or x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            "rms_norm: the weight does not fit the input",
            where=f"x {tuple(x.shape)}, weight {tuple(weight.shape)}",
            expected="weight [D] for x [..., D]",
        )
    d = x.to(torch.float64)
    mean = lane_sum(d * d) / torch.tensor(float(x.shape[-1]), dtype=torch.float64)
    inv = (1.0 / torch.sqrt(mean + eps)).to(torch.float32)
    return (x * inv.unsqueeze(-1)) * weight
