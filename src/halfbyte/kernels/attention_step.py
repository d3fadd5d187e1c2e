"""Where the tokens of one forward pass stand: what every layer's attention needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionStep"]


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """The flat tokens of a pass, ``S`` sequences with their queries one behind the other.

    Arguments:
        positions: [T] int64.
        slots: [T] int64, page * page_size + offset: where each token's key and value go.
        page_table: [S, P] int32.
        query_start: [S + 1] int32.
        context_length: [S] int32, keys that each sequence's last query sees.
        cos, sin: rotary tables [positions, D / 2] float32.
        scale: factor of the scores.
    """

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    query_start: Tensor
    context_length: Tensor
    cos: Tensor
    sin: Tensor
    scale: float
