"""RMSNorm, natively; definition in :mod:`halfbyte.kernels.reference.norm`."""

from __future__ import annotations

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.errors import ShapeError
from halfbyte.kernels.native.buffers import as_buffer

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, isa: int = 2) -> Tensor:
    """See :func:`halfbyte.kernels.reference.norm.rms_norm`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512."""
    if weight.ndim != 1 or x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            "rms_norm: the weight does not fit the input",
            where=f"x {tuple(x.shape)}, weight {tuple(weight.shape)}",
            expected="weight [D] for x [..., D]",
        )
    x, weight = as_buffer(x), as_buffer(weight)
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    _native.rms_norm(isa, x.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())
    return out
