"""From the joint projection of queries, keys and values to the output of attention: the definition, by the single steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.kernels.attention_step import AttentionStep
from halfbyte.kernels.kv import KvLayer

if TYPE_CHECKING:
    from halfbyte.kernels.protocol import Kernels

__all__ = ["attend", "check_attend"]


def check_attend(qkv: Tensor, layer: KvLayer, step: AttentionStep, q_norm: Tensor | None, k_norm: Tensor | None) -> int:
    """The number of query heads.

    Raises: ShapeError when the projection is not ``[T, (H + 2 Hkv) D]`` with whole groups of query heads, or a norm not ``[D]``.
    """
    width, kv = layer.head_dim, layer.n_kv
    heads = qkv.shape[-1] // width - 2 * kv if qkv.ndim == 2 else 0
    if heads < 1 or heads % kv or qkv.shape[1] != (heads + 2 * kv) * width or len(qkv) != step.positions.numel():
        raise ShapeError(
            "attend: the projection does not fit the pages",
            where=f"qkv {tuple(qkv.shape)}, {step.positions.numel()} positions, {kv} kv heads of {width}",
            expected="qkv [T, (H + 2 Hkv) * D] with H a multiple of Hkv",
        )
    for norm in (q_norm, k_norm):
        if norm is not None and norm.shape != (width,):
            raise ShapeError("attend: a head norm does not fit", where=f"{tuple(norm.shape)}", expected=f"[{width}]")
    return heads


def attend(
    kernels: Kernels,
    qkv: Tensor,
    layer: KvLayer,
    step: AttentionStep,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """``qkv [T, (H + 2 Hkv) D] -> [T, H D]``: split, RMSNorm of q and k heads (where given), rotation, store, attention."""
    heads, width, kv = check_attend(qkv, layer, step, q_norm, k_norm), layer.head_dim, layer.n_kv
    parts = qkv.split((heads * width, kv * width, kv * width), dim=1)
    q, k, v = (part.reshape(len(qkv), -1, width) for part in parts)
    if q_norm is not None:
        q = kernels.rms_norm(q.reshape(-1, width), q_norm, eps).view(q.shape)
    if k_norm is not None:
        k = kernels.rms_norm(k.reshape(-1, width), k_norm, eps).view(k.shape)
    q, k = (kernels.rope(x, step.positions, step.cos, step.sin) for x in (q, k))
    kernels.store_kv(layer, k, v, step.slots)
    out = kernels.attention(q, layer, step.page_table, step.query_start, step.context_length, step.scale)
    return out.view(len(qkv), heads * width)
