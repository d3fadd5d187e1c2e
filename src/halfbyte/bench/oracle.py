"""What the kernels should have computed, in float64, from the operands they were given. Shares no code with them.

The operands are the codes: that quantisation loses something is not an error of a kernel. Where a kernel quantises inside
(the activations of a W4A4 product) the oracle takes the codes of the definition (:mod:`halfbyte.formats`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import QuantSpec, QuantTensor
from halfbyte.kernels import LinearKind

__all__ = ["attention", "inputs", "product", "relative_error", "values"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROWS = 1024


def relative_error(got: Tensor, exact: Tensor) -> float:
    """The largest, over rows (all dimensions but the last), of ``|got - exact| / |exact|`` in 2-norms.

    Rows whose exact values are all zero count by their absolute error. NaN counts as infinite.
    """
    difference = (got.double() - exact.double()).flatten(0, -2).norm(dim=-1)
    size = exact.double().flatten(0, -2).norm(dim=-1)
    error = difference / torch.where(size == 0, torch.ones_like(size), size)
    return float(torch.where(error.isnan(), torch.inf, error).max()) if error.numel() else 0.0


def values(q: QuantTensor) -> Tensor:
    """What NVFP4 codes mean, float64: grid value times E4M3 scale times global scale."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float64)
    both = torch.stack([q.codes & 15, q.codes >> 4], dim=-1).flatten(-2)
    scales = q.scales.view(torch.float8_e4m3fn).double().repeat_interleave(q.spec.block, dim=-1)
    g = q.multiplier().double()
    return table[both.int()] * scales * (g.reshape(*g.shape, *([1] * (both.dim() - g.dim()))))


def inputs(x: Tensor, kind: LinearKind, spec: QuantSpec | None) -> Tensor:
    """The input of a product as the product sees it, float64: rounded to BF16, or to the codes of ``spec``."""
    if kind == "w4a4":
        assert spec is not None
        return values(formats.quantise(x, spec))
    return x.double() if kind == "fp32" else x.to(torch.bfloat16).double()


def product(x: Tensor, weight: Tensor | QuantTensor) -> Tensor:
    """``x [M, K] float64 @ weight [N, K]^T``, float64; the weight is widened a few rows at a time."""
    parts = []
    for begin in range(0, weight.shape[0], _ROWS):
        rows = slice(begin, begin + _ROWS)
        if isinstance(weight, QuantTensor):
            g = weight.global_scale if weight.global_scale.dim() == 0 else weight.global_scale[rows]
            codes = weight.codes[rows]
            wide = values(QuantTensor(codes, weight.scales[rows], g, weight.spec, (codes.shape[0], weight.shape[1])))
        else:
            wide = weight[rows].double()
        parts.append(x @ wide.T)
    return torch.cat(parts, dim=1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query a head over a whole context: ``q [H, D], k and v [T, Hkv, D] -> [H, D]``, float64."""
    group = q.shape[0] // k.shape[1]
    out = []
    for head in range(k.shape[1]):
        queries = q[head * group : (head + 1) * group].double()
        weights = torch.softmax(queries @ k[:, head].double().T * scale, dim=-1)
        out.append(weights @ v[:, head].double())
    return torch.cat(out)
