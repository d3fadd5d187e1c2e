"""Two 4-bit codes a byte: the low nibble is the even element (ggml is the exception, which we do not write)."""

from __future__ import annotations

from torch import Tensor

from halfbyte.errors import ShapeError

__all__ = ["pack_codes", "unpack_codes"]


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., K] to packed uint8 [..., K/2]. An odd K is a :class:`ShapeError`."""
    if codes.shape[-1] % 2:
        raise ShapeError(
            "cannot pack an odd number of 4-bit codes",
            where=f"codes {tuple(codes.shape)}",
            expected="an even last dimension",
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Packed uint8 [..., K/2] to uint8 codes 0..15 [..., K]."""
    out = packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2))
    out[..., 0::2] = packed & 15
    out[..., 1::2] = packed >> 4
    return out
