"""Matrix products of packed FP4 weights in Triton; codes become numbers inside the kernel, so no FP4 units are needed.

``w4a4`` follows the definition in ``reference/linear.py`` to the bit: the doubled codes are small integers, exact in FP16, and so
is their dot over a block of 16 or 32 in FP32; blocks are added in order, each scaled by the product of its two scales. What that
leaves to the order of a tensor core is a sum of integers below 2^24.

``w4a16`` multiplies BF16 by ``grid * scale``, which is exact in BF16, and adds in FP32 in the order of the tensor core:
at most ``2 * K * 2^-23 * sum |x_k w_k|`` from the exact sum, for each output.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import QuantTensor
from halfbyte.kernels.reference.linear import RowStore
from halfbyte.kernels.weights import row_global_scale

__all__ = ["w4a4_product", "w4a16_product"]

_ROWS, _COLUMNS, _DEPTH = 32, 64, 64
#: Triton's interpreter multiplies the bit patterns of BF16 numbers; there the same numbers are handed over as float32.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _nibbles(codes, row, inside, k, stride, width):  # type: ignore[no-untyped-def]
    """Codes of elements ``k`` of rows ``row`` (both int, broadcast), int32; 0 outside."""
    byte = tl.load(codes + row * stride + k // 2, mask=inside & (k < width), other=0).to(tl.int32)
    return (byte >> ((k % 2) * 4)) & 15


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _doubled(code):  # type: ignore[no-untyped-def]
    """Twice the E2M1 value of a code, an integer from -12 to 12."""
    index = code & 7
    size = tl.where(index < 2, index, (2 + (index & 1)) << tl.maximum((index >> 1) - 1, 0))
    return tl.where(code >= 8, -size, size)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale(byte, E8M0: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 of an E8M0 byte, or of a non-negative E4M3 byte."""
    if E8M0:
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        return bits.to(tl.float32, bitcast=True)
    normal = (((byte >> 3) + 120) << 23) | ((byte & 7) << 20)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _w4a4(  # type: ignore[no-untyped-def]
    a_codes, a_scales, a_rows, w_codes, w_scales, w_rows, out, M, N, K,
    BLOCK: tl.constexpr, E8M0: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    blocks = K // BLOCK
    k = tl.arange(0, BLOCK)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for b in range(blocks):
        a = _nibbles(a_codes, m[:, None], (m < M)[:, None], (b * BLOCK + k)[None, :], K // 2, K)
        w = _nibbles(w_codes, n[None, :], (n < N)[None, :], (b * BLOCK + k)[:, None], K // 2, K)
        dot = tl.dot(_doubled(a).to(tl.float16), _doubled(w).to(tl.float16), out_dtype=tl.float32)
        sa = _scale(tl.load(a_scales + m * blocks + b, mask=m < M, other=0).to(tl.int32), E8M0)
        sw = _scale(tl.load(w_scales + n * blocks + b, mask=n < N, other=0).to(tl.int32), E8M0)
        acc += dot * (sa[:, None] * sw[None, :])
    ga = tl.load(a_rows + m, mask=m < M, other=0.0)
    gw = tl.load(w_rows + n, mask=n < N, other=0.0)
    y = acc * ((ga[:, None] * gw[None, :]) * 0.25)
    tl.store(out + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _w4a16(  # type: ignore[no-untyped-def]
    x, w_codes, w_scales, w_rows, out, M, N, K,
    BLOCK: tl.constexpr, E8M0: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        there = (n < N)[None, :]
        grid = _doubled(_nibbles(w_codes, n[None, :], there, k[:, None], K // 2, K)).to(tl.float32) * 0.5
        place = w_scales + n[None, :] * (K // BLOCK) + (k // BLOCK)[:, None]
        scale = _scale(tl.load(place, mask=there & (k < K)[:, None], other=0).to(tl.int32), E8M0)
        acc += tl.dot(a, (grid * scale).to(OPERAND), out_dtype=tl.float32)
    gw = tl.load(w_rows + n, mask=n < N, other=0.0)
    tl.store(out + m[:, None] * N + n[None, :], acc * gw[None, :], mask=(m < M)[:, None] & (n < N)[None, :])


def w4a4_product(a: QuantTensor, store: RowStore) -> Tensor:
    """Product of quantised rows ``a [M, K]`` with the rows of ``store``, ``[M, N]`` float32: the bits of the reference."""
    m, k = a.shape
    codes, scales, rows = _weight(store)
    out = torch.empty(m, len(rows), dtype=torch.float32, device=codes.device)
    token = row_global_scale(a.multiplier(), (m,))
    operands = (a.codes.contiguous(), a.scales.contiguous(), token, codes, scales, rows)
    if out.numel():
        _w4a4[_grid(out)](*operands, out, m, len(rows), k, **_constants(a), ROWS=_ROWS, COLUMNS=_COLUMNS, **_LAUNCH)
    return out


def w4a16_product(x: Tensor, store: RowStore) -> Tensor:
    """``x [M, K]`` float32, rounded to BF16, times the rows of ``store``: ``[M, N]`` float32 within the bound above."""
    assert store.quantised is not None
    m, k = x.shape
    x = x.to(torch.bfloat16).contiguous()
    if _INTERPRETED:
        x = x.to(torch.float32)
    codes, scales, rows = _weight(store)
    out = torch.empty(m, len(rows), dtype=torch.float32, device=codes.device)
    if out.numel():
        _w4a16[_grid(out)](
            x, codes, scales, rows, out, m, len(rows), k, **_constants(store.quantised),
            OPERAND=tl.float32 if _INTERPRETED else tl.bfloat16, ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, **_LAUNCH,
        )  # fmt: skip
    return out


#: A product and a sum of the definition are rounded one by one.
_LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}


def _weight(store: RowStore) -> tuple[Tensor, Tensor, Tensor]:
    parts = store.parts()
    assert parts is not None
    codes, scales, rows = (t.contiguous() for t in parts)
    return codes, scales, rows


def _grid(out: Tensor) -> tuple[int, int]:
    return triton.cdiv(out.shape[0], _ROWS), triton.cdiv(out.shape[1], _COLUMNS)


def _constants(q: QuantTensor) -> dict[str, Any]:
    return {"BLOCK": q.spec.block, "E8M0": q.spec.format == "mxfp4"}
