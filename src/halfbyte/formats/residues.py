"""What is left of a code in 4, 2 or 1 bits: the payloads of TRACE (arXiv 2610.07767; 2 bits are ours), packed.

The signed index of a code counts grid points from zero: -7 (-6.0) .. 7 (6.0); code 8 (-0) has index 0, as code 0 has.

- 4 bits: the code itself, two a byte.
- 2 bits: the signed index mod 4, which names a code among any four neighbours.
- 1 bit: the signed index mod 2, the mantissa bit, which names a code among any two neighbours.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.formats.bits import pack_bits, unpack_bits
from halfbyte.formats.packing import pack_codes, unpack_codes

__all__ = ["PayloadBits", "check_bits", "pack_residues", "residues", "signed_index", "unpack_residues"]

PayloadBits = Literal[1, 2, 4]


def check_bits(bits: int) -> PayloadBits:
    """``bits`` if it is 4, 2 or 1; else a :class:`ConfigError`."""
    if bits not in get_args(PayloadBits):
        raise ConfigError(f"there is no payload of {bits} bits", expected="4, 2 or 1 bits a value")
    return 4 if bits == 4 else 2 if bits == 2 else 1


def signed_index(codes: Tensor) -> Tensor:
    """int8 index -7..7 of codes 0..15 (uint8); both zeros are 0."""
    size = (codes & 7).to(torch.int8)
    return torch.where(codes >= 8, -size, size)


def residues(codes: Tensor, bits: PayloadBits) -> Tensor:
    """uint8 values below ``2 ** bits`` of codes 0..15 (uint8), one a code."""
    return codes if bits == 4 else signed_index(codes).view(torch.uint8) & (3 if bits == 2 else 1)


def pack_residues(values: Tensor, bits: PayloadBits) -> Tensor:
    """uint8 values below ``2 ** bits`` ``[..., K]`` to packed uint8 ``[..., K * bits / 8]``, first value lowest.

    Raises:
        ShapeError: K values do not fill whole bytes.
    """
    if bits == 4:
        return pack_codes(values)
    if bits == 1:
        return pack_bits(values)
    if values.shape[-1] % 4:
        raise ShapeError(
            "2-bit values are packed four a byte",
            where=f"values {tuple(values.shape)}",
            expected="a last dimension divisible by 4",
        )
    return values[..., 0::4] | (values[..., 1::4] << 2) | (values[..., 2::4] << 4) | (values[..., 3::4] << 6)


def unpack_residues(packed: Tensor, bits: PayloadBits) -> Tensor:
    """Inverse of :func:`pack_residues`: uint8 ``[..., bytes]`` to uint8 ``[..., bytes * 8 / bits]``."""
    if bits == 4:
        return unpack_codes(packed)
    if bits == 1:
        return unpack_bits(packed)
    parts = [packed >> shift & 3 for shift in (0, 2, 4, 6)]
    return torch.stack(parts, dim=-1).flatten(-2)
