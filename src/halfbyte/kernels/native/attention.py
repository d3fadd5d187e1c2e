"""Paged attention, natively; definition in :mod:`halfbyte.kernels.reference.attention`."""

from __future__ import annotations

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.kernels.kv import KvLayer
from halfbyte.kernels.native.buffers import as_buffer
from halfbyte.kernels.native.kv_store import pages_of
from halfbyte.kernels.reference.attention import check_attention

__all__ = ["attention"]


def attention(
    q: Tensor,
    layer: KvLayer,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    *,
    isa: int = 2,
) -> Tensor:
    """See :func:`halfbyte.kernels.reference.attention.attention`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512."""
    sequences = context_len.numel()
    if (
        q.ndim != 3
        or q.shape[2] != layer.head_dim
        or q.shape[1] % layer.n_kv
        or q.shape[1] == 0
        or page_table.ndim != 2
        or page_table.shape[0] != sequences
        or query_start.shape != (sequences + 1,)
        or context_len.ndim != 1
    ):
        check_attention(q, layer, page_table, query_start, context_len)
    q, page_table = as_buffer(q), as_buffer(page_table, torch.int32)
    query_start, context_len = as_buffer(query_start, torch.int32), as_buffer(context_len, torch.int32)
    out = torch.empty_like(q)
    pages = (page_table.data_ptr(), sequences, page_table.shape[1])
    ranges = (query_start.data_ptr(), context_len.data_ptr())
    queries = (q.data_ptr(), q.shape[0], q.shape[1])
    if not _native.attention(isa, pages_of(layer), *queries, *pages, *ranges, scale, out.data_ptr()):
        check_attention(q, layer, page_table, query_start, context_len)
    return out
