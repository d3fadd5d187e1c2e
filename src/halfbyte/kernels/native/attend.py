"""Head norms, rotation, the store and attention in one native call; definition in :mod:`halfbyte.kernels.reference.attend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.kernels.attention_step import AttentionStep
from halfbyte.kernels.kv import KvLayer
from halfbyte.kernels.native.buffers import as_buffer
from halfbyte.kernels.native.kv_store import native_rule, pages_of
from halfbyte.kernels.reference import attend as reference

if TYPE_CHECKING:
    from halfbyte.kernels.protocol import Kernels

__all__ = ["attend"]


def attend(
    kernels: Kernels,
    qkv: Tensor,
    layer: KvLayer,
    step: AttentionStep,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    *,
    isa: int = 2,
) -> Tensor:
    """See :func:`halfbyte.kernels.reference.attend.attend`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512.

    What the single call cannot use (a foreign KV rule, a wrong value) goes through the single steps, which say what is wrong.
    """
    heads, sequences = reference.check_attend(qkv, layer, step, q_norm, k_norm), step.context_length.numel()
    fits = (
        step.positions.ndim == step.slots.ndim == step.context_length.ndim == 1
        and step.slots.shape == step.positions.shape
        and step.query_start.shape == (sequences + 1,)
        and step.page_table.ndim == 2
        and step.page_table.shape[0] == sequences
        and step.cos.shape == step.sin.shape
        and step.cos.shape[1:] == (layer.head_dim // 2,)
    )
    if fits and (layer.spec is None or native_rule(layer.spec)):
        qkv = as_buffer(qkv)
        out = torch.empty(len(qkv), heads * layer.head_dim)
        norms = [None if norm is None else as_buffer(norm) for norm in (q_norm, k_norm)]
        places = [as_buffer(t, torch.int64) for t in (step.positions, step.slots)]
        ranges = [as_buffer(t, torch.int32) for t in (step.page_table, step.query_start, step.context_length)]
        tables = [as_buffer(step.cos), as_buffer(step.sin)]
        if _native.attend(
            isa, pages_of(layer), qkv.data_ptr(), len(qkv), heads,
            *(0 if norm is None else norm.data_ptr() for norm in norms), eps,
            places[0].data_ptr(), step.cos.shape[0], tables[0].data_ptr(), tables[1].data_ptr(), places[1].data_ptr(),
            ranges[0].data_ptr(), sequences, step.page_table.shape[1], ranges[1].data_ptr(), ranges[2].data_ptr(),
            step.scale, out.data_ptr(),
        ):  # fmt: skip
            return out
    return reference.attend(kernels, qkv, layer, step, q_norm, k_norm, eps)
