"""The arguments on which compiled functions are compared with themselves uncompiled: where implementations part."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from halfbyte.formats import QuantSpec
from halfbyte.formats.grid import E2M1_GRID
from halfbyte.formats.quantise import LARGEST_INPUT

__all__ = ["by_rows", "near_ties", "values"]

_NEAR = (*E2M1_GRID, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0)


def by_rows(spec: QuantSpec) -> QuantSpec:
    """The spec with a global scale for each row, so that the largest numbers of the probe do not make the others zero."""
    if spec.format == "mxfp4":
        return spec
    return spec.replace(global_scale="token", global_update="recompute", scale_rows=1)


def values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[rows, K]``: grid points and ties and two ulps around them under every mantissa of a scale, numbers of all magnitudes
    from subnormal to 2^126, zeros of both signs, whole blocks of zeros."""
    return _rows().to(dtype).clamp(-LARGEST_INPUT, LARGEST_INPUT).to(device)


def near_ties(blocks: Tensor, scale: Tensor, multiply: bool) -> Tensor:
    """``blocks`` [N, elements] with every second element replaced by a grid point or tie, or one near it, times its scale."""
    generator = torch.Generator().manual_seed(1202)
    near = _near()
    picks = near[torch.randint(len(near), blocks.shape, generator=generator)].to(blocks.device)
    found = picks / scale if multiply else picks * scale
    there = torch.isfinite(found) & (found.abs() <= LARGEST_INPUT)
    there[:, ::2] = False
    return torch.where(there, found.to(blocks.dtype), blocks)


@cache
def _near() -> Tensor:
    near = torch.tensor(_NEAR)
    for towards in (torch.tensor(torch.inf), torch.tensor(-torch.inf)):
        step = torch.nextafter(near, towards)
        near = torch.cat([near, step, torch.nextafter(step, towards)])
    return torch.cat([near, -near])


@cache
def _rows() -> Tensor:
    width, near = 512, _near()
    generator = torch.Generator().manual_seed(2405)
    picks = near[torch.randint(len(near), (96, width), generator=generator)].view(96, -1, 16)
    picks[..., 0] = 6.0  # so that the scale of the block is the factor below, whatever the rule
    factors = torch.arange(8, 16).repeat(12).view(96, 1, 1) / 8.0
    exponents = torch.randint(-12, 12, (96, 1, 1), generator=generator)
    ties = torch.ldexp(picks * factors, exponents).view(96, width)
    normal = torch.randn(48, width, generator=generator) * torch.exp(4 * torch.randn(48, 1, generator=generator))
    mixed = torch.ldexp(
        torch.randn(48, width, generator=generator), torch.randint(-8, 8, (48, width), generator=generator)
    )
    every = torch.arange(-149, 127, 2).repeat(4)[: 16 * 32].view(16, 32, 1)
    magnitudes = torch.ldexp(torch.randn(16, 32, 16, generator=generator).double(), every).float().view(16, width)
    sparse = torch.where(torch.rand(32, width, generator=generator) < 0.9, torch.zeros(()), normal[:32])
    sparse = torch.where(torch.rand(32, width, generator=generator) < 0.5, sparse, -sparse)
    zeros = torch.zeros(16, width)
    zeros[::2] = -0.0
    return torch.cat([ties, normal, mixed, magnitudes, sparse, zeros])
