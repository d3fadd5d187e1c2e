"""Rotary position embedding, natively; definition in :mod:`halfbyte.kernels.reference.rope`."""

from __future__ import annotations

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.kernels.native.buffers import as_buffer
from halfbyte.kernels.reference.rope import check_rope

__all__ = ["rope"]


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, isa: int = 2) -> Tensor:
    """See :func:`halfbyte.kernels.reference.rope.rope`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512."""
    if x.ndim != 3 or positions.shape != x.shape[:1] or cos.shape != sin.shape or cos.shape[1:] != (x.shape[2] // 2,):
        check_rope(x, positions, cos, sin)
    x, positions = as_buffer(x), as_buffer(positions, torch.int64)
    cos, sin = as_buffer(cos), as_buffer(sin)
    out = torch.empty_like(x)
    rows, heads, width = x.shape
    tables = (cos.shape[0], cos.data_ptr(), sin.data_ptr())
    if not _native.rope(isa, x.data_ptr(), positions.data_ptr(), *tables, rows, heads, width, out.data_ptr()):
        check_rope(x, positions, cos, sin)
    return out
