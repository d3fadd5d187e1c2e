"""The three small number formats: E2M1 codes, E4M3 and E8M0 scales.

E2M1 (OCP Microscaling specification 1.0): code = sign << 3 | index into ``E2M1_GRID``; the lowest bit of the index is
the mantissa bit, and neighbouring codes always differ in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.spec import Ties, ZeroSign

__all__ = [
    "E2M1_GRID",
    "E2M1_MAX",
    "E4M3_MAX",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "decode_packed",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
]

E2M1_GRID: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
_SIGNED = torch.tensor([*E2M1_GRID, *(-v for v in E2M1_GRID)], dtype=torch.float32)
_PAIRS = torch.stack((_SIGNED.repeat(16), _SIGNED.repeat_interleave(16)), dim=1)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# Whether a value exactly on each midpoint goes up.
_UP: dict[Ties, tuple[bool, ...]] = {
    "even": (False, True, False, True, False, True, False),
    "toward_zero": (False,) * 7,
    "away": (True,) * 7,
}


def encode_e2m1(z: Tensor, ties: Ties = "even", zero_sign: ZeroSign = "positive") -> Tensor:
    """Nearest E2M1 code of each float32 value, saturating at 6. NaN is the caller's error.

    Returns: uint8 codes 0..15, one per element, shape of ``z``. With ``zero_sign='positive'`` code 8 (-0) never occurs.
    """
    size = z.abs()
    index = torch.zeros(z.shape, dtype=torch.uint8, device=z.device)
    for midpoint, up in zip(_MIDPOINTS, _UP[ties]):
        index += size >= midpoint if up else size > midpoint
    if zero_sign == "nonpositive":
        sign = z <= 0
    else:
        sign = torch.signbit(z) if zero_sign == "keep" else z < 0
    if zero_sign == "positive":
        sign = sign & (index != 0)
    return index | (sign.to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Float32 values of codes 0..15 (uint8)."""
    return _SIGNED.to(codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def decode_packed(packed: Tensor) -> Tensor:
    """Float32 values [..., K] of packed codes [..., K/2] (low nibble = even element)."""
    pairs = _PAIRS.to(packed.device).index_select(0, packed.flatten().to(torch.int32))
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode_e4m3(value: Tensor) -> Tensor:
    """E4M3 (fn variant: no infinity) bytes of float32 values: round to nearest even, saturating at +-448.

    Saturation is ours: an unclamped cast writes NaN above 448 (ModelOpt #1633).
    """
    return value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(scales: Tensor) -> Tensor:
    """Float32 values of E4M3 bytes (0x7F and 0xFF decode to NaN)."""
    return scales.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e8m0(exponent: Tensor) -> Tensor:
    """E8M0 bytes of integer exponents, saturating at 2^-127 and 2^127 (byte 255 would be NaN)."""
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def decode_e8m0(scales: Tensor) -> Tensor:
    """Float32 powers of two of E8M0 bytes: 2^(byte - 127), 2^-127 as a subnormal, byte 255 as NaN."""
    byte = scales.to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    bits = torch.where(byte == 255, 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)
