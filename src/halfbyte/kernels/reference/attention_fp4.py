"""The part of attention that FP4 pages do in integers (definition of the bits; our own order).

Sums of integers are exact, so they may be taken in any order and by any instruction (``vpdpbusd`` in the native kernels). g is a
doubled E2M1 value, e an E4M3 scale, b a block of 16 dimensions.

    scores   n_d = round(q_d 2^k), ties to even, with one k a query: 22 minus the exponent of 1.0078125 max |q| (at least
             -100), so that |n| <= 0x7F7F7F, three signed bytes. Then
             s_j = (sum over b in order of float(sum_d n_d g_jd) * (e_jb 2^-8)) * (((global * scale) * 2^-k) * 128)
    softmax  as in :mod:`halfbyte.kernels.reference.attention`, but p_j = exp(s_j - top), top the largest score of the strip
             (0 below exp(-87)), and h = exp(top - m') beside it: l_i = l_i * alpha + (p_i + ..) * h
    values   w_jb = round(p_j * (e_jb 2^(30 - E_b))), E_b the largest exponent field (at least 1) of the strip's scales, so
             that w < 2^24, three bytes. Then t = float(sum_j (w_j >> 8) g_jd) * 256 + float(sum_j (w_j & 255) g_jd) and
             acc_d = acc_d * alpha + t * (h * 2^(E_b - 31))
    out      (acc * global) / l + 0; NaN if q holds NaN or infinity, or if the factor of the scores is not finite
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats import decode_e2m1, decode_e4m3
from halfbyte.kernels.kv import TILE, KvLayer
from halfbyte.kernels.reference.tiles import Tiles, read_tiles

__all__ = ["Fp4Query", "add_fp4_values", "fp4_scores"]


@dataclass(frozen=True)
class Fp4Query:
    """Queries as integers [blocks, 16, n, n_kv, M] (float64) and what turns sums into scores [n, n_kv, M] (NaN: broken)."""

    integers: Tensor
    factor: Tensor

    @staticmethod
    def of(rows: Tensor, global_scale: float, scale: float) -> Fp4Query:
        """Split rows [D, n, n_kv, M]."""
        top = rows.abs().amax(0)
        finite = torch.isfinite(top)
        exponent = ((torch.where(finite, top, 0.0) * 1.0078125).view(torch.int32) >> 23) - 127
        k = 22 - exponent.clamp(min=-100)
        k = torch.where(finite, k, 22)
        integers = torch.where(finite, rows, 0.0) * power_of_two(k)
        factor = ((torch.tensor(global_scale) * torch.tensor(scale, dtype=torch.float32)) * power_of_two(-k)) * 128.0
        factor = torch.where(finite & torch.isfinite(factor), factor, torch.nan)
        return Fp4Query(integers.round().double().view(-1, 16, *rows.shape[1:]), factor)

    def first(self, n: int) -> Fp4Query:
        """Those of the first n sequences."""
        return Fp4Query(self.integers[:, :, :n], self.factor[:n])


def fp4_scores(query: Fp4Query, layer: KvLayer, tiles: Tiles) -> Tensor:
    """Scores of one strip: [keys, n, n_kv, M]."""
    assert layer.k_scales is not None
    keys = torch.cat([_doubled_grid(t).flatten(0, 1) for t in read_tiles(layer.k, tiles)], 1)  # [D, keys, n, n_kv]
    keys = keys.view(-1, 16, *keys.shape[1:]).permute(3, 4, 0, 2, 1)
    # Exact, so in any order: [n, n_kv, blocks, keys, M].
    dots = torch.matmul(keys.double(), query.integers.permute(2, 3, 0, 1, 4)).float()
    scales = torch.cat(read_tiles(layer.k_scales, tiles), 1)  # [blocks, keys, n, n_kv]
    factors = (decode_e4m3(scales) * 2.0**-8).permute(2, 3, 0, 1).unsqueeze(-1)
    result = torch.zeros_like(dots[:, :, 0])
    for block in range(dots.shape[2]):
        result += dots[:, :, block] * factors[:, :, block]
    return (result * query.factor.unsqueeze(2)).permute(2, 0, 1, 3).contiguous()


def add_fp4_values(acc: Tensor, p: Tensor, gain: Tensor, seen: Tensor, layer: KvLayer, tiles: Tiles) -> None:
    """acc [D, n, n_kv, M] (times alpha already) += the values of one strip; p [keys, n, n_kv, M], gain and seen [n, n_kv, M]."""
    assert layer.v_scales is not None
    values = torch.cat([_values(t) for t in read_tiles(layer.v, tiles)], 2)  # [blocks, 16, keys, n, n_kv]
    values = values.permute(3, 4, 0, 1, 2).double()
    scales = torch.cat(read_tiles(layer.v_scales, tiles), 1)  # [blocks, keys, n, n_kv]
    largest = (scales.int() >> 3).cummax(1).values.clamp(min=1).movedim(1, 0)  # of the first keys
    last = (seen - 1).clamp(0, len(p) - 1).expand(1, len(scales), *seen.shape)
    exponent = largest.unsqueeze(-1).expand(*largest.shape, seen.shape[-1]).gather(0, last)[0]  # [blocks, n, n_kv, M]
    unit = power_of_two(30 - exponent).unsqueeze(1)
    weights = p * (decode_e4m3(scales).unsqueeze(-1) * unit)  # [blocks, keys, n, n_kv, M]
    integers = weights.round().double().permute(2, 3, 0, 1, 4)  # [n, n_kv, blocks, keys, M]
    rest = (integers / 256.0).floor()
    sums = torch.matmul(values, rest).float() * 256.0 + torch.matmul(values, integers - 256.0 * rest).float()
    down = (gain * power_of_two(exponent - 31)).permute(1, 2, 0, 3).unsqueeze(3)  # [n, n_kv, blocks, 1, M]
    acc += (sums * down).permute(2, 3, 0, 1, 4).reshape(acc.shape)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, -126 .. 127."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _doubled_grid(words: Tensor) -> Tensor:
    """int32 words [W, 16, ...] to doubled E2M1 values [W, 8, 16, ...], float32."""
    table = decode_e2m1(torch.arange(16, dtype=torch.uint8)) * 2.0
    out = torch.empty((words.shape[0], 8, *words.shape[1:]))
    for n in range(8):
        out[:, n] = table.index_select(0, ((words >> (4 * n)) & 15).flatten()).view_as(words)
    return out


def _values(words: Tensor) -> Tensor:
    """A tile of values [D/8, 16, n, n_kv] as doubled E2M1 values [blocks, 16 elements, 16 keys, n, n_kv]."""
    grid = _doubled_grid(words).view(-1, 2, 4, 2, 16, *words.shape[2:])  # block, g, i, h, element
    return grid.permute(0, 4, 1, 3, 2, 5, 6).reshape(grid.shape[0], 16, TILE, *words.shape[2:])
