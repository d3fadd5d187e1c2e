"""Stochastic rounding, for gradients only: unbiased, so never for weights or activations that must be reproduced."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.formats.block_scale import e4m3_bytes, e4m3_target, e8m0_bytes
from halfbyte.formats.grid import E2M1_GRID, E2M1_MAX, decode_e4m3, decode_e8m0
from halfbyte.formats.quantise import join_tiles, split_tiles
from halfbyte.formats.spec import QuantSpec
from halfbyte.formats.tensor import QuantTensor

__all__ = ["quantise_stochastic"]

_GRID = torch.tensor(E2M1_GRID)


def quantise_stochastic(
    x: Tensor,
    spec: QuantSpec,
    generator: torch.Generator,
    *,
    global_scale: Tensor | None = None,
    name: str = "gradient",
) -> QuantTensor:
    """Quantise x [..., K] so that the expected dequantised value is x.

    Each value goes to one of its two grid neighbours with the probability of its distance to the other (NVFP4
    pre-training, arXiv 2509.25149, section on stochastic rounding of gradients). Reconstruction: a block scale that
    rounding to nearest left too small for the block maximum takes the next larger byte, because a saturated value is
    biased; the largest scale (448, or 2^127) cannot grow, so a constant global scale that is too small still saturates.

    Arguments:
        x: the gradient, float32 or bfloat16.
        spec: as in :func:`quantise`; its ``ties`` rule has nothing to decide. Four-over-six is a ConfigError: choosing
            a scale by its rounding error conditions on the noise and is biased.
        generator: source of the uniform numbers, one for each element.

    Raises: as :func:`quantise`.
    """
    if spec.four_over_six != "none":
        raise ConfigError(
            "stochastic rounding and four-over-six exclude each other",
            where=f"spec {spec.name!r}",
            expected="four_over_six='none'",
        )
    tiles = split_tiles(x, spec, global_scale, name)
    if spec.format == "mxfp4":
        scales, largest = e8m0_bytes(tiles.amax, spec.mx_scale), 0xFE
        small = E2M1_MAX * decode_e8m0(scales) < tiles.amax
    else:
        scales, largest = e4m3_bytes(e4m3_target(tiles.amax, tiles.g, tiles.inverse, spec), spec), 0x7E
        small = E2M1_MAX * decode_e4m3(scales) * tiles.g < tiles.amax
    scales = scales + (small & (scales < largest)).to(torch.uint8)
    z = tiles.scaled(decode_e8m0(scales) if spec.format == "mxfp4" else decode_e4m3(scales), spec)
    size = z.abs().clamp(max=E2M1_MAX)
    low = torch.bucketize(size, _GRID, right=True, out_int32=True).clamp(max=7) - 1
    step = _GRID.index_select(0, low.flatten() + 1).view(z.shape) - _GRID.index_select(0, low.flatten()).view(z.shape)
    share = (size - _GRID.index_select(0, low.flatten()).view(z.shape)) / step
    index = low + (torch.rand(z.shape, generator=generator) < share).to(torch.int32)
    codes = torch.where((z < 0) & (index != 0), index + 8, index).to(torch.uint8)
    return join_tiles(codes, scales, tiles, spec, tuple(x.shape))
