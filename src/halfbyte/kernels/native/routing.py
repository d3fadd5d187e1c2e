"""Top-k routing, natively; definition in :mod:`halfbyte.kernels.reference.routing`."""

from __future__ import annotations

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.kernels.native.buffers import as_buffer
from halfbyte.kernels.reference import routing as reference

__all__ = ["route"]


def route(logits: Tensor, k: int, *, normalise: bool, isa: int = 2) -> tuple[Tensor, Tensor]:
    """See :func:`halfbyte.kernels.reference.routing.route`; logits that are not finite go there."""
    reference.check_route(logits, k)
    logits = as_buffer(logits)
    rows, experts = logits.shape
    ids, gates = torch.empty(rows, k, dtype=torch.int32), torch.empty(rows, k)
    if not _native.route(isa, logits.data_ptr(), rows, experts, k, normalise, ids.data_ptr(), gates.data_ptr()):
        return reference.route(logits, k, normalise=normalise)
    return ids, gates
