"""Quantisation by any rule: the passes over elements natively, the few numbers a block by the definition in ``formats``."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import QuantSpec, QuantTensor
from halfbyte.formats.block_scale import e4m3_bytes, e4m3_target, e8m0_bytes, element_scales
from halfbyte.formats.grid import decode_e4m3, decode_e8m0
from halfbyte.formats.quantise import LARGEST_INPUT, settled_global
from halfbyte.kernels import _native
from halfbyte.kernels.native.buffers import new_buffer

__all__ = ["quantise_by_parts"]

_TIES = {"even": 0, "toward_zero": 1, "away": 2}
_ZERO_SIGNS = {"positive": 0, "keep": 1, "negative": 2, "nonpositive": 3}


def quantise_by_parts(isa: int, x: Tensor, spec: QuantSpec, global_scale: Tensor | None, name: str) -> QuantTensor:
    """See :func:`halfbyte.formats.quantise`. Four-over-six, which judges whole blocks, and FP16 stay with the definition."""
    ready = x.dtype in (torch.float32, torch.bfloat16) and x.numel() > 0 and spec.four_over_six == "none"
    if not ready or not formats.fits(tuple(x.shape), spec):
        return formats.quantise(x, spec, global_scale=global_scale, name=name)
    v, bf16 = x.detach().contiguous(), x.dtype == torch.bfloat16
    shape, rows = tuple(v.shape), spec.scale_rows
    blocks = v.numel() // spec.block
    amax = torch.empty(*shape[:-1], shape[-1] // spec.block)
    _native.block_amax(isa, v.data_ptr(), bf16, spec.block, blocks, amax.data_ptr())
    if not float(amax.max()) <= LARGEST_INPUT:  # NaN fails the comparison too
        return formats.quantise(
            x, spec, global_scale=global_scale, name=name
        )  # raises, with the message of the definition
    if rows != 1:
        amax = amax.view(*shape[:-2], shape[-2] // rows, rows, amax.shape[-1]).amax(-2)
    amax = amax.to(x.dtype)  # exact: the arithmetic of some rules depends on it
    stored, g, inverse = settled_global(amax, spec, global_scale, shape[:-1], name)
    if spec.format == "mxfp4":
        scales = e8m0_bytes(amax, spec.mx_scale)
        decoded = decode_e8m0(scales)
    else:
        scales = e4m3_bytes(e4m3_target(amax, g, inverse, spec), spec)
        decoded = decode_e4m3(scales)
    factors, multiply = element_scales(decoded, g, inverse, spec)
    if rows != 1:
        scales, factors = (t.repeat_interleave(rows, dim=-2) for t in (scales, factors))
    factors, scales = factors.contiguous(), scales.contiguous()
    codes = new_buffer((*shape[:-1], shape[-1] // 2), torch.uint8)
    _native.rule_codes(
        isa, multiply, _TIES[spec.ties], _ZERO_SIGNS[spec.zero_sign], spec.overflow == "wrap",
        v.data_ptr(), bf16, factors.data_ptr(), spec.block, blocks, codes.data_ptr(),
    )  # fmt: skip
    return QuantTensor(codes, scales, stored, spec, shape)
