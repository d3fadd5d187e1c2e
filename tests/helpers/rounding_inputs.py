"""Numbers where quantisers may part: ties, zeros of both signs, wide ranges, subnormals."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("normal", "grid", "zeros", "wide", "subnormal")


def tensor(rows: int, k: int, seed: int, kind: str) -> Tensor:
    """float32 [rows, k] of one of KINDS."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g) * torch.exp(torch.randn(rows, 1, generator=g) * 4)
    if kind == "grid":  # most quotients are ties or grid points
        x = torch.randint(-24, 25, (rows, k), generator=g) * 0.25 * 2.0 ** float(torch.randint(-9, 9, (), generator=g))
    elif kind == "zeros":
        x = torch.where(torch.rand(rows, k, generator=g) < 0.9, torch.zeros(()), x)
        x[::2] = 0
    elif kind == "wide":
        x = x * torch.exp(torch.randn(rows, k, generator=g) * 12)
    elif kind == "subnormal":
        x = x * 2.0**-140
    x[0, ::5] = -0.0
    return x
