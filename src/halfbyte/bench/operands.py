"""Random operands as uneven as those of a language model.

Plain Gaussian blocks all have nearly the same scale, and FP4 products of such blocks add up without any rounding: an error
column over them would show nothing. Here every block of 16 has a magnitude of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["uneven"]


def uneven(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """float32 [rows, columns]: normal, times 2^(1.5 z) with a normal z a block of 16, over the square root of ``columns``."""
    x: Tensor = torch.randn(rows, columns, generator=generator)
    magnitude = torch.exp2(1.5 * torch.randn(rows, -(-columns // 16), generator=generator))
    return x.mul_(magnitude.repeat_interleave(16, dim=1)[:, :columns]).mul_(columns**-0.5)
