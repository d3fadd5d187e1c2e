"""Reference quantiser: the definitions of ``halfbyte.formats``, as kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import ShapeError
from halfbyte.formats import QuantSpec, QuantTensor

__all__ = ["check_dtype", "dequantise", "fake_quantise", "quantise"]


def quantise(x: Tensor, spec: QuantSpec, *, global_scale: Tensor | None = None, name: str = "tensor") -> QuantTensor:
    """Quantises ``x [..., K]`` (float32 or bfloat16); see :func:`halfbyte.formats.quantise`."""
    return formats.quantise(x, spec, global_scale=global_scale, name=name)


def dequantise(q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of ``q`` in ``dtype``; see :func:`halfbyte.formats.dequantise`."""
    return formats.dequantise(q, dtype)


def fake_quantise(x: Tensor, spec: QuantSpec, *, name: str = "tensor") -> Tensor:
    """``dequantise(quantise(x))`` in ``x``'s dtype and shape; leading dimensions are rows (tokens).

    Raises:
        ShapeError: ``x`` is neither float32 nor bfloat16, or has no dimension of whole blocks.
        NumericsError: ``x`` holds NaN or infinity.
    """
    check_dtype(x, name)
    return formats.dequantise(formats.quantise(x, spec, name=name), x.dtype)


def check_dtype(x: Tensor, name: str) -> None:
    """Raises:
    ShapeError: ``x`` is neither float32 nor bfloat16.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ShapeError(f"{name} has dtype {x.dtype}", where=name, expected="float32 or bfloat16")
