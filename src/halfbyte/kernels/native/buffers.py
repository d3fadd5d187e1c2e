"""Tensors as the contiguous buffers whose addresses the extension takes. Copies only where layout or dtype differ."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_buffer"]


def as_buffer(t: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``t`` contiguous in ``dtype``; keep the result alive while its address is in use."""
    return t if t.dtype == dtype and t.is_contiguous() else t.to(dtype).contiguous()
