"""Paged keys and values of one decoder layer.

Pages hold ``page_size`` tokens (a multiple of 16), cut into tiles of 16 consecutive tokens, the unit of attention. In
a tile the layout is chosen so that 16 keys, and 16 neighbouring head dimensions of a value, are vector lanes:

    fp32, bf16   k [pages, kv heads, tiles, D, 16]            v [pages, kv heads, tiles, 16, D]
    fp4          k, v [pages, kv heads, tiles, D/8, 16]       int32 words of eight 4-bit codes, lowest nibble first
                 k_scales, v_scales [pages, kv heads, tiles, D/16, 16]    E4M3 bytes, last index the key

FP4 keys: nibble n of word w, lane j is element 8 w + n of key j. FP4 values: nibble 2 i + h of word 2 b + g, lane j is
element 16 b + j of key 8 g + 4 h + i, so that the bytes of a word, masked or shifted, belong to four keys in a row.
Words are little-endian. Only this module and the attention and store kernels know the layout;
everybody else reads tokens back with :meth:`KvLayer.read` and :meth:`KvLayer.quantised`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.formats import QuantSpec, QuantTensor, pack_codes

__all__ = [
    "TILE",
    "KvKind",
    "KvLayer",
    "check_slots",
    "copy_pages",
    "kv_bytes_per_token",
    "new_kv_layer",
    "unpack_words",
]

KvKind = Literal["fp32", "bf16", "fp4"]
TILE = 16


@dataclass(frozen=True, eq=False)
class KvLayer:
    """Page arrays for the keys and values of one layer (layout: module docstring). Made by :func:`new_kv_layer`."""

    kind: KvKind
    page_size: int
    n_kv: int
    head_dim: int
    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    spec: QuantSpec | None = None

    @property
    def n_pages(self) -> int:
        """Pages allocated."""
        return self.k.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        arrays = [t for t in (self.k, self.v, self.k_scales, self.v_scales) if t is not None]
        return sum(t.numel() * t.element_size() for t in arrays)

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token's key and value over all kv heads."""
        return kv_bytes_per_token(self.n_kv, self.head_dim, self.kind)

    @property
    def global_scale(self) -> float:
        """The constant global scale of an fp4 layer (1.0 for the other kinds)."""
        if self.spec is None or self.spec.global_scale == "none":
            return 1.0
        return self.spec.constant

    def quantised(self, slots: Tensor) -> tuple[QuantTensor, QuantTensor]:
        """Codes and scales of the keys and values at ``slots`` [T] in plain order: two QuantTensors [T, n_kv, D].

        Raises: ConfigError unless the layer is fp4; ShapeError for a slot outside the pages.
        """
        if self.k_scales is None or self.v_scales is None or self.spec is None:
            raise ConfigError(
                "only an fp4 KV layer has codes and scales",
                where=f"a layer of kind {self.kind}",
                fix="use KvLayer.read for values",
            )
        page, tile, lane = check_slots(self, slots)
        shape = (slots.numel(), self.n_kv, self.head_dim)
        out = []
        for words, scales, keys in ((self.k, self.k_scales, True), (self.v, self.v_scales, False)):
            codes = unpack_words(words[page, :, tile], keys)[torch.arange(slots.numel()), :, lane]
            plain = scales[page, :, tile, :, lane]
            out.append(
                QuantTensor(pack_codes(codes), plain.contiguous(), torch.tensor(self.global_scale), self.spec, shape)
            )
        return out[0], out[1]

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots`` [T] as float32 [T, n_kv, D], exactly as attention sees them.

        Raises: ShapeError for a slot outside the pages.
        """
        if self.kind == "fp4":
            k, v = self.quantised(slots)
            return k.dequantise(), v.dequantise()
        page, tile, lane = check_slots(self, slots)
        return self.k[page, :, tile, :, lane].float(), self.v[page, :, tile, lane].float()


def kv_bytes_per_token(n_kv: int, head_dim: int, kind: KvKind) -> int:
    """Bytes of one token's key and value in one layer."""
    per_head = {"fp32": 4 * head_dim, "bf16": 2 * head_dim, "fp4": head_dim // 2 + head_dim // 16}[kind]
    return 2 * n_kv * per_head


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def new_kv_layer(
    n_pages: int,
    page_size: int,
    n_kv: int,
    head_dim: int,
    kind: KvKind,
    spec: QuantSpec | None = None,
    *,
    zeros: Callable[[Sequence[int], torch.dtype], Tensor] = _zeros,
) -> KvLayer:
    """Allocate a zeroed layer of ``n_pages`` pages of ``page_size`` tokens.

    Arguments:
        kind: what a stored element is: fp32, bf16 (rounded to nearest even), fp4 (quantised along the head dimension).
        spec: for fp4, an NVFP4 spec whose global scale is constant or none (a page must not depend on its neighbours).
        zeros: makes the arrays.
    Raises: ShapeError for sizes that cannot be used; ConfigError for a wrong kind or spec.
    """
    if kind not in get_args(KvKind):
        raise ConfigError(f"there is no KV kind {kind!r}", expected="one of " + ", ".join(get_args(KvKind)))
    if page_size <= 0 or page_size % TILE:
        raise ShapeError(f"page_size {page_size} cannot be used", expected=f"a positive multiple of {TILE}")
    if min(n_pages, n_kv - 1, head_dim - 1) < 0:
        raise ShapeError(
            "a KV layer needs n_pages >= 0, n_kv >= 1, head_dim >= 1",
            where=f"n_pages {n_pages}, n_kv {n_kv}, head_dim {head_dim}",
        )
    lead = (n_pages, n_kv, page_size // TILE)
    if kind != "fp4":
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        return KvLayer(
            kind,
            page_size,
            n_kv,
            head_dim,
            zeros((*lead, head_dim, TILE), dtype),
            zeros((*lead, TILE, head_dim), dtype),
        )
    if head_dim % 16:
        raise ShapeError(
            f"head_dim {head_dim} cannot be quantised in blocks of 16",
            expected="a multiple of 16",
            fix="use KV kind bf16 for this model",
        )
    if spec is None or spec.format != "nvfp4" or spec.global_scale not in ("constant", "none") or spec.scale_rows != 1:
        raise ConfigError(
            "an fp4 KV layer cannot use this QuantSpec",
            where=f"spec {spec}",
            expected="format nvfp4, global_scale constant or none, scale_rows 1",
            fix="use halfbyte_kv",
        )
    words = [zeros((*lead, head_dim // 8, TILE), torch.int32) for _ in "kv"]
    scales = [zeros((*lead, head_dim // 16, TILE), torch.uint8) for _ in "kv"]
    return KvLayer(kind, page_size, n_kv, head_dim, words[0], words[1], scales[0], scales[1], spec)


def copy_pages(layer: KvLayer, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy pages ``src[i]`` over pages ``dst[i]``, all at once (copy-on-write of pages shared by several samples).

    Raises: ShapeError for a page that does not exist, a page written twice, or lists of unequal length.
    """
    if len(src) != len(dst) or len(set(dst)) != len(dst):
        raise ShapeError(f"copy_pages: {len(src)} sources, {len(set(dst))} distinct targets of {len(dst)}")
    if not src:
        return
    low, high = min(*src, *dst), max(*src, *dst)
    if low < 0 or high >= layer.n_pages:
        raise ShapeError(f"copy_pages: page {low} or {high} does not exist", expected=f"0..{layer.n_pages - 1}")
    source, target = torch.tensor(src), torch.tensor(dst)
    for array in (layer.k, layer.v, layer.k_scales, layer.v_scales):
        if array is not None:
            array.index_copy_(0, target, array.index_select(0, source))


def check_slots(layer: KvLayer, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split slots [T] into page, tile and lane; ShapeError for a slot outside the pages."""
    total = layer.n_pages * layer.page_size
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < total:
        raise ShapeError(
            "a KV slot is outside the pages",
            where=f"slots {int(slots.min())}..{int(slots.max())}",
            expected=f"0..{total - 1}",
        )
    offset = slots % layer.page_size
    return slots // layer.page_size, offset // TILE, offset % TILE


def unpack_words(words: Tensor, keys: bool) -> Tensor:
    """int32 words [..., D/8, 16] of FP4 tiles to uint8 codes [..., 16 keys, D]; ``keys``: key layout, else values'."""
    nibbles = ((words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15).to(
        torch.uint8
    )  # [..., w, lane, n]
    if keys:
        return nibbles.movedim(-2, -3).flatten(-2)
    lead, blocks = words.shape[:-2], words.shape[-2] // 2
    split = nibbles.view(*lead, blocks, 2, 16, 4, 2)  # block, g, element, i, h
    n = len(lead)
    order = (*range(n), n + 1, n + 4, n + 3, n, n + 2)  # g, h, i, block, element
    return split.permute(order).reshape(*lead, TILE, 16 * blocks)
