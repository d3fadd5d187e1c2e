"""Native rows of guidance; definition in ``reference/guidance_rows.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.formats import PayloadBits
from halfbyte.formats.residues import check_bits
from halfbyte.kernels import _native
from halfbyte.kernels.kv import KvLayer, check_slots
from halfbyte.kernels.native.buffers import as_buffer
from halfbyte.kernels.native.kv_store import pages_of
from halfbyte.kernels.reference.guidance_rows import RowPart, check_parts, check_read
from halfbyte.kernels.reference.guidance_rows import read_kv as reference_read_kv

__all__ = ["read_kv", "store_parts"]


def store_parts(rows: Tensor, slots: Tensor, parts: Sequence[RowPart]) -> None:
    """See :func:`halfbyte.kernels.reference.guidance_rows.store_parts`."""
    check_parts(rows, slots, parts)
    _require_contiguous(rows)
    slots, count = slots.contiguous(), max(1, len(slots))
    held = [(source.contiguous(), start) for source, start in parts]
    _native.store_parts(
        rows.data_ptr(), rows.shape[1], slots.data_ptr(), len(slots),
        [(source.data_ptr(), start, source.numel() // count, source.dtype != torch.uint8) for source, start in held],
    )  # fmt: skip


def read_kv(
    isa: int, layer: KvLayer, part: Literal["k", "v"], slots: Tensor, bits: PayloadBits, rows: Tensor, start: int
) -> None:
    """See :func:`halfbyte.kernels.reference.guidance_rows.read_kv`."""
    if layer.kind != "fp4":
        return reference_read_kv(layer, part, slots, bits, rows, start)  # raises
    check_read(layer, slots, check_bits(bits), rows, start)
    _require_contiguous(rows)
    slots = as_buffer(slots, torch.int64)
    addresses = (slots.data_ptr(), len(slots), bits, rows.data_ptr(), rows.shape[1], start)
    if not _native.read_kv(isa, pages_of(layer), part == "k", *addresses):
        check_slots(layer, slots)  # raises
    return None


def _require_contiguous(rows: Tensor) -> None:
    if not rows.is_contiguous():
        raise ShapeError("rows are written in place", where=f"strides {rows.stride()}", expected="contiguous rows")
