"""SwiGLU, natively; definition in :mod:`halfbyte.kernels.reference.swiglu`."""

from __future__ import annotations

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.errors import ShapeError
from halfbyte.kernels.native.buffers import as_buffer

__all__ = ["swiglu"]


def swiglu(gate_up: Tensor, *, isa: int = 2) -> Tensor:
    """See :func:`halfbyte.kernels.reference.swiglu.swiglu`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512."""
    if gate_up.shape[-1] % 2:
        raise ShapeError(
            "swiglu: gate and up must have the same width",
            where=f"gate_up {tuple(gate_up.shape)}",
            expected="an even last dimension",
        )
    gate_up = as_buffer(gate_up)
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width))
    _native.swiglu(isa, gate_up.data_ptr(), gate_up.numel() // max(1, 2 * width), width, out.data_ptr())
    return out
