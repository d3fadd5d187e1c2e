"""Rows of guidance, one a token: what a pass recorded, stored at the tokens' slots, and codes read out of KV pages.

A part of a row is (source, first byte). A uint8 source [T, ...] is copied; of a float32 source [T, ...], powers of two, the
exponent is stored, biased by 127, one byte a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.formats import PayloadBits, payload_of
from halfbyte.kernels.kv import KvLayer

__all__ = ["RowPart", "check_parts", "check_read", "read_kv", "store_parts"]

RowPart = tuple[Tensor, int]


def check_parts(rows: Tensor, slots: Tensor, parts: Sequence[RowPart]) -> None:
    """Raises:
    ShapeError: a slot outside the rows, a part of another length or dtype, or beyond the end of a row.
    """
    if rows.dim() != 2 or rows.dtype != torch.uint8 or slots.dim() != 1 or slots.dtype != torch.int64:
        raise ShapeError(
            f"rows {tuple(rows.shape)} {rows.dtype}, slots {tuple(slots.shape)} {slots.dtype}",
            where="store_parts",
            expected="rows [S, bytes] uint8 and slots [T] int64",
        )
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(rows):
        raise ShapeError(
            f"slots {int(slots.min())}..{int(slots.max())}", where="store_parts", expected=f"0..{len(rows) - 1}"
        )
    for source, start in parts:
        fits = source.dim() > 0 and len(source) == len(slots)
        fits = fits and 0 <= start <= rows.shape[1] - source.numel() // max(1, len(slots))
        if not fits or source.dtype not in (torch.uint8, torch.float32):
            raise ShapeError(
                f"a part {tuple(source.shape)} {source.dtype} at byte {start}",
                where="store_parts",
                expected=f"[{len(slots)}, ...] uint8 or float32 within rows of {rows.shape[1]} bytes",
            )


def store_parts(rows: Tensor, slots: Tensor, parts: Sequence[RowPart]) -> None:
    """Writes ``parts`` into ``rows`` [S, bytes] uint8 at ``slots`` [T] int64, distinct; other bytes stay as they are.

    Raises:
        ShapeError: see :func:`check_parts`.
    """
    check_parts(rows, slots, parts)
    for source, start in parts:
        flat = source.reshape(len(slots), source.numel() // max(1, len(slots)))
        stored = flat if flat.dtype == torch.uint8 else (flat.contiguous().view(torch.int32) >> 23).byte()
        rows[slots, start : start + flat.shape[1]] = stored


def check_read(layer: KvLayer, slots: Tensor, bits: PayloadBits, rows: Tensor, start: int) -> None:
    """Raises:
    ShapeError: rows of another length, dtype or layout, or too narrow.
    """
    width = layer.n_kv * layer.head_dim * (2 * bits + 1) // 16
    if (
        rows.dtype != torch.uint8
        or rows.dim() != 2
        or len(rows) != slots.numel()
        or not 0 <= start <= rows.shape[1] - width
    ):
        raise ShapeError(
            f"rows {tuple(rows.shape)} {rows.dtype} from byte {start}",
            where="read_kv",
            expected=f"[{slots.numel()}, n] uint8 with room for {width} bytes",
        )


def read_kv(
    layer: KvLayer, part: Literal["k", "v"], slots: Tensor, bits: PayloadBits, rows: Tensor, start: int
) -> None:
    """Codes (as ``bits`` say) and block scales of the keys or values at ``slots`` [T], for all heads, into ``rows`` [T, bytes]
    uint8 from byte ``start`` on: all codes, then all scales.

    Raises:
        ConfigError: the layer is not fp4.
        ShapeError: a slot outside the pages; see also :func:`check_read`.
    """
    check_read(layer, slots, bits, rows, start)
    payload = payload_of(layer.quantised(slots)[0 if part == "k" else 1], bits)
    flat = torch.cat([payload.codes.flatten(1), payload.scales.flatten(1)], dim=1)
    rows[:, start : start + flat.shape[1]] = flat
