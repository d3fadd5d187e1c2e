"""SwiGLU (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.kernels.reference.elementary import exp

__all__ = ["swiglu"]


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2I] (float32; gate first) to (gate / (1 + exp(-gate))) * up, [..., I].

    Raises: ShapeError when the last dimension is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ShapeError(
            "swiglu: gate and up must have the same width",
            where=f"gate_up {tuple(gate_up.shape)}",
            expected="an even last dimension",
        )
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate / (1.0 + exp(-gate))) * up
