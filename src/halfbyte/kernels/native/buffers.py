"""Tensors as the contiguous buffers whose addresses the extension takes. Copies only where layout or dtype differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import halfbyte.kernels._native as _native

__all__ = ["as_buffer", "new_buffer", "new_zeros"]

_LARGE = 4 << 20  # bytes from which pages of 2 MiB are worth asking for


def as_buffer(t: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``t`` contiguous in ``dtype``; keep the result alive while its address is in use."""
    return t if t.dtype == dtype and t.is_contiguous() else t.to(dtype).contiguous()


def new_buffer(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory, in huge pages where it is large and the system has them."""
    out = torch.empty(*shape, dtype=dtype)
    if out.nbytes >= _LARGE:
        _native.use_huge_pages(out.data_ptr(), out.nbytes)
    return out


def new_zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """As :func:`new_buffer`, filled with zero."""
    return new_buffer(shape, dtype).zero_()
