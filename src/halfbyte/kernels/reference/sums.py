"""Sums in a defined order: they depend on the numbers and their indices, never on the shape around them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCK", "LANES", "block_sums", "lane_sum", "running_sum"]

LANES = 16
BLOCK = 1024


def block_sums(x: Tensor) -> Tensor:
    """Float64 sums of each block of 1024 elements of the last dimension: [..., N] to [..., ceil(N / 1024)].

    Within a block element i belongs to lane i % 16; each lane adds its elements in order, starting at +0; then lanes
    are added in halves (lane j += lane j + 8, then 4, 2, 1). Missing elements count as +0.
    """
    n = x.shape[-1]
    d = x.to(torch.float64)
    rows = max(1, -(-min(n, BLOCK) // LANES))
    blocks = max(1, -(-n // BLOCK))
    d = torch.nn.functional.pad(d, (0, blocks * rows * LANES - n)).view(*x.shape[:-1], blocks, rows, LANES)
    lanes = 0.0 + d[..., 0, :]
    for i in range(1, d.shape[-2]):
        lanes = lanes + d[..., i, :]
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half:]
        half //= 2
    return lanes[..., 0]


def running_sum(x: Tensor) -> Tensor:
    """Float64 running sums along the last dimension, strictly in order (numpy defines ``accumulate`` as sequential)."""
    return torch.from_numpy(np.add.accumulate(x.to(torch.float64).cpu().numpy(), axis=-1)).to(x.device)


def lane_sum(x: Tensor) -> Tensor:
    """Float64 sum over the last dimension: :func:`block_sums`, then the blocks in order."""
    return running_sum(block_sums(x))[..., -1]
