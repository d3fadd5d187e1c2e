"""Block scales: E4M3 bytes (NVFP4) and E8M0 bytes (MXFP4) from block maxima, and the scaling of elements by them."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.grid import E2M1_MAX, decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0
from halfbyte.formats.spec import MxScale, QuantSpec

__all__ = [
    "apply_scales",
    "decode_scales",
    "e4m3_bytes",
    "e4m3_target",
    "e8m0_bytes",
    "element_scales",
    "scaled_elements",
]

_LARGEST = torch.finfo(torch.float32).max


def e4m3_target(amax: Tensor, g: Tensor, inverse: Tensor, spec: QuantSpec) -> Tensor:
    """The E4M3 scale before rounding, float32, in the spec's order of operations.

    Arguments:
        amax: block maxima [..., blocks], in the dtype of the input.
        g, inverse: global multiplier and its inverse, broadcastable to ``amax``.
    """
    if spec.block_scale == "divide_product":
        return amax.to(torch.float32) / (E2M1_MAX * g)
    a = amax if spec.arithmetic == "input" else amax.to(torch.float32)
    six = a.new_full((), E2M1_MAX)  # where a lies: CUDA multiplies by the reciprocal of a divisor on the CPU
    sixth = (a / six if spec.amax_division == "divide" else a * (1.0 / six)).to(torch.float32)
    return sixth / g if spec.block_scale == "divide" else sixth * inverse


def e4m3_bytes(target: Tensor, spec: QuantSpec) -> Tensor:
    """E4M3 bytes of the targets: zero rule, floor, round to nearest even with saturation, zero rule again.

    The zero rule and the floor never write NaN, whatever the tensor (ModelOpt #1397 wrote 0x7F for an all-zero block).
    """
    target = torch.where(target == 0, spec.zero_scale, target).clamp(min=spec.scale_floor)
    scales = encode_e4m3(target)
    return torch.where(scales == 0, encode_e4m3(torch.tensor(spec.zero_scale)), scales)


def e8m0_bytes(amax: Tensor, rule: MxScale) -> Tensor:
    """E8M0 bytes of block maxima (float32 or bfloat16). The five rules are distinct (vLLM #43557 mixed two of them up):

    - ``floor``: floor(log2(amax)) - 2 (OCP Microscaling 1.0, section 6.3); amax in (6, 8) * scale saturates.
    - ``even``: as floor, after rounding amax to one mantissa bit, half up (so from 1.75 * 2^k it is the next power).
    - ``rceil``: exact round-up of fp32(amax / 6) to a power of two (cuBLAS block scaling; PTX ``cvt.rp.ue8m0x2``):
      nothing saturates.
    - ``modelopt``: ceil of the correctly rounded fp32 log2(amax / 6), at least -127; differs from ``rceil`` a few ulps
      above a power of two, where the fp32 logarithm is an integer.
    - ``naive``: floor(log2(fp32(amax / 6))): up to half of the range saturates. Exists to be compared with.
    """
    a = amax.to(torch.float32)
    sixth = a / a.new_full((), E2M1_MAX)  # where a lies, see above
    if rule == "modelopt":
        log = torch.log2(sixth.to(torch.float64)).to(torch.float32)
        return encode_e8m0(torch.ceil(log.clamp(min=-127.0)).to(torch.int32))
    bits = (sixth if rule in ("rceil", "naive") else a).contiguous().view(torch.int32)
    if rule == "even":
        bits = bits + (1 << 21)
    exponent = (bits >> 23) - 127
    if rule == "rceil":
        # A subnormal above 2^-127 needs 2^-126; one below it fits 2^-127.
        above = torch.where(exponent == -127, bits > 0x00400000, (bits & 0x7FFFFF) != 0)
        return encode_e8m0(exponent + above.to(torch.int32))
    return encode_e8m0(exponent if rule == "naive" else exponent - 2)


def decode_scales(scales: Tensor, spec: QuantSpec) -> Tensor:
    """Float32 values of block scale bytes, in the format of the spec."""
    return decode_e4m3(scales) if spec.format == "nvfp4" else decode_e8m0(scales)


def element_scales(s: Tensor, g: Tensor, inverse: Tensor, spec: QuantSpec) -> tuple[Tensor, bool]:
    """What the elements of each block are divided by, or multiplied with (True), in the spec's order of fp32 operations.

    Arguments:
        s: decoded block scales; g, inverse: as in :func:`e4m3_target`, broadcastable to ``s``.

    Returns:
        float32 of the shape of ``s``, NaN where the scale is zero.
    """
    if spec.format == "mxfp4":
        return s, False
    if spec.element_scale == "divide_product" or spec.element_scale == "divide_ratio":
        divisor = s * g if spec.element_scale == "divide_product" else s / inverse
        return torch.where(divisor > 0, divisor, torch.nan), False
    safe = torch.where(s > 0, s, 1.0)
    factor = inverse / safe if spec.element_scale == "reciprocal_global" else 1.0 / (g * safe)
    return torch.where(s > 0, factor.clamp(max=_LARGEST), torch.nan), True


def scaled_elements(x: Tensor, s: Tensor, g: Tensor, inverse: Tensor, spec: QuantSpec) -> Tensor:
    """z of every element: x over its scale; 0 where the scale is zero.

    Arguments:
        x: float32 [..., blocks, elements]; s: decoded block scales [..., blocks, 1]; g, inverse: as in
            :func:`e4m3_target`, broadcastable to ``s``.
    """
    return apply_scales(x, *element_scales(s, g, inverse, spec))


def apply_scales(x: Tensor, scale: Tensor, multiply: bool) -> Tensor:
    """:func:`scaled_elements` from what :func:`element_scales` returned, broadcastable to ``x``."""
    return torch.where(scale.isnan(), 0.0, x * scale if multiply else x / scale)
