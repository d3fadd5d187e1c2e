"""Rotary position embedding (RoFormer, arXiv 2104.09864), half-split as in Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import ShapeError

__all__ = ["check_rope", "rope"]


def check_rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ShapeError unless shapes fit and every position is in the tables."""
    shapes = f"x {tuple(x.shape)}, positions {tuple(positions.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
    if x.ndim != 3 or positions.shape != x.shape[:1] or cos.shape != sin.shape or cos.shape[1:] != (x.shape[2] // 2,):
        raise ShapeError(
            "rope: shapes do not fit", where=shapes, expected="x [M, heads, D], positions [M], cos and sin [P, D/2]"
        )
    if x.shape[0] and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise ShapeError(
            "rope: a position is outside the tables",
            where=f"positions {int(positions.min())}..{int(positions.max())}",
            expected=f"0..{cos.shape[0] - 1}",
        )


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [M, heads, D] (float32) by ``positions`` [M] (int64), with tables cos and sin [P, D/2] (float32).

    first = x1 * cos - x2 * sin; second = x2 * cos + x1 * sin (x1, x2 the halves of the last dimension).
    """
    check_rope(x, positions, cos, sin)
    half = x.shape[2] // 2
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)
