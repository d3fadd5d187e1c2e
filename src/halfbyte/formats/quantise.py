"""Reference quantiser (torch): the definition that every kernel must match bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats.block_scale import decode_scales, e4m3_bytes, e4m3_target, e8m0_bytes, scaled_elements
from halfbyte.formats.global_scale import check_global, fixed_global, multiplier_pair, stored_global
from halfbyte.formats.grid import E2M1_MAX, decode_e2m1, decode_e4m3, encode_e2m1
from halfbyte.formats.packing import pack_codes
from halfbyte.formats.spec import QuantSpec
from halfbyte.formats.tensor import QuantTensor

__all__ = [
    "LARGEST_INPUT",
    "Tiles",
    "block_scales",
    "check_input",
    "fits",
    "join_tiles",
    "quantise",
    "round_elements",
    "settled_global",
    "split_tiles",
    "untile",
]

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_INPUT = 2.0**126  # above it, rounding up to the next representable value could overflow float32


@dataclass(frozen=True, eq=False)
class Tiles:
    """A tensor cut into the groups of elements that share one block scale.

    Arguments:
        values: float32 [..., blocks, elements]; with 2-D scales [..., rows/16, blocks, 16*block].
        amax: their maxima [..., blocks], in the dtype of the input.
        stored: the global scale as stored, shape () or [...] (one a row).
        g, inverse: :func:`multiplier_pair` of it, shape () or [..., 1].
    """

    values: Tensor
    amax: Tensor
    stored: Tensor
    g: Tensor
    inverse: Tensor

    def scaled(self, s: Tensor, spec: QuantSpec) -> Tensor:
        """z of every element for decoded block scales ``s`` [..., blocks]."""
        g, inverse = (t.unsqueeze(-1) if t.ndim else t for t in (self.g, self.inverse))
        return scaled_elements(self.values, s.unsqueeze(-1), g, inverse, spec)


def fits(shape: tuple[int, ...], spec: QuantSpec) -> bool:
    """Whether a tensor of that shape can be quantised: whole blocks in the last dimension, whole 2-D tiles of rows."""
    whole = len(shape) > 0 and shape[-1] % spec.block == 0
    return whole and (spec.scale_rows == 1 or (len(shape) > 1 and shape[-2] % spec.scale_rows == 0))


def check_input(x: Tensor, spec: QuantSpec, name: str) -> None:
    """ShapeError for a shape that cuts a block (torchao #3233), NumericsError for NaN, infinity,
    a magnitude above 2^126 or another dtype."""
    if x.dtype not in _INPUT_DTYPES:
        raise NumericsError(f"{name} has dtype {x.dtype}", where=name, expected="float32, bfloat16 or float16")
    if not fits(tuple(x.shape), spec):
        rows = f" and a second-to-last one divisible by {spec.scale_rows}" if spec.scale_rows != 1 else ""
        raise ShapeError(
            f"{name} does not divide into blocks",
            where=f"{name} of shape {tuple(x.shape)}",
            expected=f"a last dimension divisible by {spec.block}{rows} ({spec.format})",
            fix="keep this tensor in BF16",
        )
    if x.numel() and not float(x.abs().amax()) <= LARGEST_INPUT:  # NaN fails the comparison too
        bad = int((~(x.abs() <= LARGEST_INPUT)).sum())
        raise NumericsError(
            f"{name} holds NaN, infinity or a magnitude above 2^126",
            where=f"{name}: {bad} of {x.numel()} elements",
            expected="finite numbers",
        )


def split_tiles(x: Tensor, spec: QuantSpec, global_scale: Tensor | None, name: str) -> Tiles:
    """Check the input, cut it into tiles and settle the global scale. Errors as in :func:`quantise`."""
    check_input(x, spec, name)
    blocks = x.shape[-1] // spec.block
    if spec.scale_rows == 1:
        tiles = x.reshape(*x.shape[:-1], blocks, spec.block)
    else:
        rows = spec.scale_rows
        tiles = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, blocks, spec.block).transpose(-3, -2).flatten(-2)
    amax = tiles.abs().amax(-1)
    return Tiles(tiles.to(torch.float32), amax, *settled_global(amax, spec, global_scale, tuple(x.shape[:-1]), name))


def settled_global(
    amax: Tensor, spec: QuantSpec, global_scale: Tensor | None, leading: tuple[int, ...], name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The global scale as stored, and its :func:`multiplier_pair` broadcastable to ``amax`` [..., blocks].

    Arguments:
        global_scale: given from elsewhere, or None for the spec's mode.
        leading: shape of the tensor without its last dimension.
    """
    if global_scale is not None:
        stored = check_global(global_scale, leading, spec, name)
    elif spec.global_scale in ("constant", "none"):
        stored = fixed_global(spec)
    elif spec.global_scale == "token":
        stored = stored_global(amax.amax(-1) if amax.shape[-1] else amax.new_zeros(leading), spec)
    else:
        stored = stored_global(amax.amax() if amax.numel() else amax.new_zeros(()), spec)
    stored = stored.to(amax.device)  # CUDA multiplies by the reciprocal of a divisor on the CPU
    g, inverse = multiplier_pair(stored, spec)
    if g.ndim:
        g, inverse = g.unsqueeze(-1), inverse.unsqueeze(-1)
    return stored, g, inverse


def join_tiles(codes: Tensor, scales: Tensor, tiles: Tiles, spec: QuantSpec, shape: tuple[int, ...]) -> QuantTensor:
    """A QuantTensor from codes [..., blocks, elements] and scale bytes [..., blocks] in the layout of ``tiles``."""
    if spec.scale_rows != 1:
        scales = scales.repeat_interleave(spec.scale_rows, dim=-2)
    return QuantTensor(pack_codes(untile(codes, spec, shape)), scales, tiles.stored, spec, shape)


def untile(elements: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    """Something of every element, in the layout of :class:`Tiles`, as a tensor of ``shape``."""
    if spec.scale_rows != 1:
        elements = elements.reshape(*elements.shape[:-1], spec.scale_rows, spec.block).transpose(-3, -2)
    return elements.reshape(shape)


def round_elements(z: Tensor, spec: QuantSpec) -> Tensor:
    """Codes 0..15 (uint8) of elements over their scales."""
    codes = encode_e2m1(z, spec.ties, spec.zero_sign)
    return torch.where(z.abs() >= 7.0, 8, codes).to(torch.uint8) if spec.overflow == "wrap" else codes


def _squared_error(z: Tensor, s: Tensor, tiles: Tiles, spec: QuantSpec) -> Tensor:
    rounded = decode_e2m1(encode_e2m1(z, spec.ties, spec.zero_sign))
    if spec.overflow == "wrap":  # that library judges the value it meant to write
        rounded = torch.where(z.abs() >= 7.0, 2.0 * torch.round(z / 2.0), rounded)
    values = rounded * s.unsqueeze(-1)
    if spec.global_convention == "amax":
        stored = tiles.stored.unsqueeze(-1).unsqueeze(-1) if tiles.stored.ndim else tiles.stored
        values = values * stored / values.new_full((), E2M1_MAX * spec.scale_max)
    else:
        values = values * (tiles.g.unsqueeze(-1) if tiles.g.ndim else tiles.g)
    error = (values - tiles.values).square().to(torch.float64)
    total = error[..., 0]
    for i in range(1, error.shape[-1]):  # in order, so that no reduction tree decides a choice of scale
        total = total + error[..., i]
    return total


def block_scales(tiles: Tiles, spec: QuantSpec) -> Tensor:
    """Scale bytes [..., blocks] of the tiles."""
    if spec.format == "mxfp4":
        return e8m0_bytes(tiles.amax, spec.mx_scale)
    target = e4m3_target(tiles.amax, tiles.g, tiles.inverse, spec)
    scales = e4m3_bytes(target, spec)
    if spec.four_over_six == "none":
        return scales
    scales4 = e4m3_bytes(target * 1.5, spec)
    s, s4 = decode_e4m3(scales), decode_e4m3(scales4)
    error4 = _squared_error(tiles.scaled(s4, spec), s4, tiles, spec)
    return torch.where(error4 < _squared_error(tiles.scaled(s, spec), s, tiles, spec), scales4, scales)


def quantise(x: Tensor, spec: QuantSpec, *, global_scale: Tensor | None = None, name: str = "tensor") -> QuantTensor:
    """Quantise x [..., K] (float32, bfloat16 or float16) along its last dimension.

    The default rule (specs ``halfbyte``, ``halfbyte_token``, ``halfbyte_kv``), in fp32: g = smallest power of two >=
    amax / 2688 (1 for an all-zero tensor); scale byte = E4M3(min(448, (block amax / 6) / g)), round to nearest even;
    z = x / (scale * g) with a true division; code = E2M1 of z, ties to the even code, saturating at 6, zeros positive
    (code 8 is never written); a zero scale gives codes 0.

    Arguments:
        x: the tensor. ``name`` stands for it in errors.
        spec: every choice of the rule.
        global_scale: a global scale from elsewhere (calibration, a shared group), in the spec's convention, shape () or
            [...]; overrides the spec's mode.

    Raises:
        ShapeError: K is not a multiple of ``spec.block`` (or rows of 16 for 2-D scales), or the global scale misfits.
        NumericsError: NaN, infinity or a magnitude above 2^126 in x, or a global scale that is not positive and finite.
    """
    tiles = split_tiles(x, spec, global_scale, name)
    scales = block_scales(tiles, spec)
    codes = round_elements(tiles.scaled(decode_scales(scales, spec), spec), spec)
    return join_tiles(codes, scales, tiles, spec, tuple(x.shape))
