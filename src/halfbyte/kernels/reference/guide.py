"""Reference of rollout-guided rounding (TRACE, arXiv 2610.07767, section 3; 2 bits and the threshold shift are ours).

With s the rollout's block scale, in the arithmetic of the spec: z = clip(x / s, -6, 6), {q-, q+} the neighbouring grid values
around z, and y = s * q where q is the one of the two that the payload points at.

- 4 bits: the one nearer to the rollout's code.
- 1 bit: the one whose mantissa bit is the payload's.
- 2 bits: the one nearer to the code that the residue names, taken from q- - 1, q-, q+, q+ + 1 (in steps of the grid). Where that
  step would leave the grid the code can only lie on the other side.

Edges: z on a grid point keeps it (2 bits may move one step, to the neighbour that the residue names); |z| = 6, also after the
clip, has the bracket {4, 6}; a zero scale gives 0; -0 counts as 0 and zeros come out positive.

``shift`` in [0, 1] moves the threshold between q- and q+ away from the one pointed at: 1 always takes it, 0 is rounding to
nearest by the spec at the rollout's scale, between them it is taken from a distance of at most (1 + shift) / 2 of the bracket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import ConfigError, ShapeError
from halfbyte.formats import Payload, QuantSpec, QuantTensor, encode_e2m1, payload_of, signed_index
from halfbyte.formats.block_scale import apply_scales, decode_scales, element_scales
from halfbyte.formats.global_scale import multiplier_pair
from halfbyte.formats.grid import E2M1_GRID, E2M1_MAX
from halfbyte.formats.quantise import check_input
from halfbyte.formats.residues import PayloadBits, check_bits, unpack_residues

__all__ = ["SIGNED_GRID", "GuidedBlocks", "check_guided", "guided_round", "quantise_with_payload", "round_towards"]

#: The grid values in order, float32 ``[15]``.
SIGNED_GRID = torch.tensor([*(-v for v in reversed(E2M1_GRID[1:])), *E2M1_GRID])
_TOP = 7  # the largest signed index


def quantise_with_payload(
    x: Tensor, spec: QuantSpec, bits: PayloadBits, *, global_scale: Tensor | None = None, name: str = "tensor"
) -> tuple[QuantTensor, Payload]:
    """The quantised tensor and what it tells a learner in ``bits`` a value; see :func:`halfbyte.formats.quantise`."""
    check_bits(bits)
    q = formats.quantise(x, spec, global_scale=global_scale, name=name)
    return q, payload_of(q, bits)


def check_guided(x: Tensor, payload: Payload, shift: float, guided: Tensor | None, name: str) -> Tensor | None:
    """Refuses what does not fit together; returns the mask of guided rows, bool ``x.shape[:-1]``, None for all.

    Raises:
        ShapeError: another dtype than float32 or bfloat16, a payload of another shape, a mask that does not fit the rows.
        ConfigError: a shift outside [0, 1].
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ShapeError(f"{name} has dtype {x.dtype}", where=name, expected="float32 or bfloat16")
    if tuple(payload.shape) != tuple(x.shape):
        raise ShapeError(
            f"the guidance of {name} is of another tensor",
            where=f"{name} {tuple(x.shape)}, guidance {tuple(payload.shape)}",
            expected="one shape",
        )
    if not 0.0 <= shift <= 1.0:
        raise ConfigError(f"a threshold shift of {shift}", where=name, expected="a number from 0 to 1")
    if guided is None:
        return None
    rows = tuple(x.shape[:-1])
    if guided.dtype != torch.bool or tuple(guided.shape) != rows[: guided.dim()]:
        raise ShapeError(
            f"the mask of guided rows of {name} is {guided.dtype} {tuple(guided.shape)}",
            where=name,
            expected=f"bool, {rows} or its leading dimensions",
        )
    return guided.reshape(*guided.shape, *[1] * (len(rows) - guided.dim())).expand(rows)


def guided_round(
    x: Tensor, payload: Payload, *, shift: float = 1.0, guided: Tensor | None = None, name: str = "tensor"
) -> Tensor:
    """``x [..., K]`` rounded at the payload's scales towards the payload's codes, in ``x``'s dtype.

    Arguments:
        shift: see above.
        guided: bool, the rows (or leading dimensions of them) that have guidance; the others are quantised on their own scale to
            nearest, as ``fake_quantise`` does, and their part of the payload is not read.

    Raises:
        ShapeError, ConfigError: see :func:`check_guided`; K that cuts a block.
        NumericsError: ``x`` holds NaN or infinity.
    """
    rows = check_guided(x, payload, shift, guided, name)
    check_input(x, payload.spec, name)
    blocks, spec, grid = GuidedBlocks.of(x, payload), payload.spec, SIGNED_GRID.to(x.device)
    tiles = x.reshape(*payload.scales.shape, spec.block)
    codes = payload.codes.reshape(*payload.scales.shape, spec.block * payload.bits // 8)
    scales = (blocks.scale, blocks.s, blocks.g)
    y = round_towards(tiles, codes, *scales, grid, spec, payload.bits, blocks.multiply, shift).reshape(x.shape)
    if rows is None or not x.numel():
        return y
    own = formats.dequantise(formats.quantise(x, payload.spec, name=name), x.dtype)
    return torch.where(rows.unsqueeze(-1), y, own)


@dataclass(frozen=True, eq=False)
class GuidedBlocks:
    """What a payload says of each block: float32 ``[..., K / block, 1]``.

    Arguments:
        s: block scales.
        g: global scale as a multiplier, of that shape or ``[..., 1, 1]`` or ``[]``.
        scale, multiply: what elements are divided by or multiplied with, see :func:`halfbyte.formats.block_scale.element_scales`.
    """

    s: Tensor
    g: Tensor
    scale: Tensor
    multiply: bool

    @staticmethod
    def of(x: Tensor, payload: Payload) -> GuidedBlocks:
        """Of the payload of ``x``."""
        spec = payload.spec
        s = decode_scales(payload.scales, spec).unsqueeze(-1)
        # where x lies, because CUDA multiplies by the reciprocal of a divisor on the CPU
        g, inverse = multiplier_pair(payload.global_scale.to(x.device), spec)
        if g.dim():
            g, inverse = g[..., None, None], inverse[..., None, None]
        return GuidedBlocks(s, g, *element_scales(s, g, inverse, spec))


def round_towards(
    tiles: Tensor,
    codes: Tensor,
    scale: Tensor,
    s: Tensor,
    g: Tensor,
    grid: Tensor,
    spec: QuantSpec,
    bits: PayloadBits,
    multiply: bool,
    shift: float,
) -> Tensor:
    """The rounding itself, a function of tensors.

    Arguments:
        tiles: ``[..., blocks, block]``, float32 or bfloat16.
        codes: the payload's, ``[..., blocks, block * bits / 8]`` uint8.
        scale, s, g, multiply: see :class:`GuidedBlocks`.
        grid: :data:`SIGNED_GRID`, where the tiles lie.
    """
    z = apply_scales(tiles.to(torch.float32), scale, multiply).clamp(-E2M1_MAX, E2M1_MAX)
    index = _pick(z, unpack_residues(codes, bits), bits, spec, shift, grid)
    index = torch.where(s > 0, index, 0)
    return ((grid[index + _TOP] * s) * g).to(tiles.dtype)


def _pick(z: Tensor, residue: Tensor, bits: PayloadBits, spec: QuantSpec, shift: float, grid: Tensor) -> Tensor:
    """Signed indices, int64, of the values that replace z."""
    if shift == 0:
        return signed_index(encode_e2m1(z, spec.ties, spec.zero_sign)).long()
    low = (torch.bucketize(z, grid, right=True) - 1 - _TOP).clamp(max=_TOP - 1)
    high = torch.where(z <= -E2M1_MAX, 1 - _TOP, torch.bucketize(z, grid) - _TOP)
    target = _target(low, high, residue, bits)
    if shift == 1:
        return target
    inside = torch.minimum(torch.maximum(target, low), high)  # a grid point stays one unless the shift is full
    reach = torch.tensor((1.0 + shift) / 2.0) * (grid[high + _TOP] - grid[low + _TOP])
    near = (z - grid[inside + _TOP]).abs() <= reach
    return torch.where(near, inside, low + high - inside)


def _target(low: Tensor, high: Tensor, residue: Tensor, bits: PayloadBits) -> Tensor:
    if bits == 4:
        return torch.minimum(torch.maximum(signed_index(residue).long(), low), high)
    step = residue.long() - low
    if bits == 1:
        return torch.where(step & 1 == 1, high, low)
    step = step & 3
    between = (
        (step == 1) | ((step == 2) & (high < _TOP)) | ((step == 3) & (low == -_TOP))
    )  # the code lies at q+ or beyond
    open_ = torch.where(between, high, low)
    point = low + (step == 1).long() - (step == 3).long()
    return torch.where(low < high, open_, point)
