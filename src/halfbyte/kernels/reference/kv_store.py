"""Writing keys and values into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats import QuantTensor, quantise, unpack_codes
from halfbyte.kernels.kv import KvLayer, check_slots

__all__ = ["check_store", "store_kv"]


def check_store(layer: KvLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Raise ShapeError for wrong shapes or slots (outside, repeated), NumericsError for NaN or infinity."""
    expected = (slots.numel(), layer.n_kv, layer.head_dim)
    if k.shape != expected or v.shape != expected or slots.ndim != 1:
        raise ShapeError(
            "store_kv: shapes do not fit",
            where=f"k {tuple(k.shape)}, v {tuple(v.shape)}, slots {tuple(slots.shape)}",
            expected=f"k and v [T, {layer.n_kv}, {layer.head_dim}], slots [T]",
        )
    for name, t in (("k", k), ("v", v)):
        finite = torch.isfinite(t).flatten(1).all(1)
        if not bool(finite.all()):
            raise NumericsError(
                f"store_kv: {name} holds NaN or infinity",
                where=f"row {int((~finite).nonzero()[0])}",
                expected="finite numbers",
            )
    if torch.unique(slots).numel() != slots.numel():
        raise ShapeError("store_kv: a slot is written twice in one call", expected="distinct slots")
    check_slots(layer, slots)


def store_kv(layer: KvLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k, v [T, n_kv, D] (float32) at ``slots`` [T] (int64, page * page_size + offset; distinct).

    fp32 keeps the numbers, bf16 rounds to nearest even, fp4 quantises each row of D with the layer's spec.
    Raises: ShapeError, NumericsError (see :func:`check_store`).
    """
    check_store(layer, k, v, slots)
    page, tile, lane = check_slots(layer, slots)
    if slots.numel() == 0:
        return
    if layer.spec is None or layer.k_scales is None or layer.v_scales is None:
        layer.k[page, :, tile, :, lane] = k.to(layer.k.dtype)
        layer.v[page, :, tile, lane] = v.to(layer.v.dtype)
        return
    _store_keys(layer.k, layer.k_scales, quantise(k, layer.spec, name="keys"), (page, tile, lane))
    _store_values(layer.v, layer.v_scales, quantise(v, layer.spec, name="values"), (page, tile, lane))


def _store_keys(words: Tensor, scales: Tensor, q: QuantTensor, where: tuple[Tensor, Tensor, Tensor]) -> None:
    page, tile, lane = where
    words[page, :, tile, :, lane] = q.codes.view(torch.int32)  # four bytes of a row are one word of that key's lane
    scales[page, :, tile, :, lane] = q.scales


def _store_values(words: Tensor, scales: Tensor, q: QuantTensor, where: tuple[Tensor, Tensor, Tensor]) -> None:
    page, tile, lane = where
    codes = unpack_codes(q.codes).view(*q.scales.shape, 16).to(torch.int32)  # [T, n_kv, D/16, 16]
    t, n_kv, blocks, _ = codes.shape
    shift = (8 * (lane % 4) + lane % 8 // 4 * 4).to(torch.int32).view(t, 1, 1, 1)
    word = 2 * torch.arange(blocks) + lane.unsqueeze(1) // 8  # [T, D/16]
    row = ((page.unsqueeze(1) * n_kv + torch.arange(n_kv)) * words.shape[2] + tile.unsqueeze(1)) * words.shape[3]
    index = (row.unsqueeze(2) + word.unsqueeze(1)).unsqueeze(3) * 16 + torch.arange(16)
    flat = words.view(-1)
    # Keys of one call may share a word: adding (new - old) in place of each nibble is right in any order, modulo 2^32.
    old = (flat[index] >> shift) & 15
    flat.index_add_(0, index.flatten(), ((codes - old) << shift).flatten())
    scales[page, :, tile, :, lane] = q.scales
