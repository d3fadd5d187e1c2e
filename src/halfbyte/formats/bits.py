"""One bit a code: the mantissa bit, which tells a code from both of its neighbours (TRACE, arXiv 2610.07767)."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.formats.packing import unpack_codes
from halfbyte.formats.tensor import QuantTensor

__all__ = ["mantissa_bits", "pack_bits", "unpack_bits"]

_WEIGHTS = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)


def pack_bits(bits: Tensor) -> Tensor:
    """uint8 or bool bits 0/1 [..., K] to packed uint8 [..., K/8]; bit i of a byte is element 8 * byte + i."""
    if bits.shape[-1] % 8:
        raise ShapeError(
            "bits are packed eight a byte",
            where=f"bits {tuple(bits.shape)}",
            expected="a last dimension divisible by 8",
        )
    groups = bits.to(torch.uint8).reshape(*bits.shape[:-1], bits.shape[-1] // 8, 8)
    return (groups * _WEIGHTS.to(bits.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Packed uint8 [..., K/8] to uint8 bits 0/1 [..., K]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


def mantissa_bits(q: QuantTensor) -> Tensor:
    """Lowest bit of every code, packed: uint8 [..., K/8]. Neighbouring grid values always differ in it."""
    return pack_bits(unpack_codes(q.codes) & 1)
