"""The reference with its element-wise passes compiled: quantise, fake_quantise and guided_round, bit for bit the same.

Block scales come from the reference; what is compiled reads each element once (see ``exact.py``
for why). A call with a single block stays eager (torch
would compile it again for that size).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from halfbyte.formats import Payload, PayloadBits, QuantSpec, QuantTensor, payload_of
from halfbyte.formats.block_scale import apply_scales, decode_scales, element_scales
from halfbyte.formats.grid import decode_e2m1
from halfbyte.formats.quantise import (
    Tiles,
    block_scales,
    check_input,
    join_tiles,
    quantise,
    round_elements,
    split_tiles,
    untile,
)
from halfbyte.formats.residues import check_bits
from halfbyte.kernels.compiled import probe
from halfbyte.kernels.compiled.exact import Function, compile_exactly
from halfbyte.kernels.reference import ReferenceKernels
from halfbyte.kernels.reference.guide import SIGNED_GRID, GuidedBlocks, check_guided, round_towards
from halfbyte.kernels.reference.quantise import check_dtype

__all__ = ["CompiledKernels"]


class CompiledKernels(ReferenceKernels):
    """``Kernels`` in torch, partly compiled; the docstrings are the protocol's.

    Arguments:
        insist: raise a ConfigError where a function cannot be compiled without changing bits, instead of running it uncompiled.
    """

    def __init__(self, *, insist: bool = False) -> None:
        self.insist = insist

    @property
    def name(self) -> str:
        return "compiled"

    def quantise(
        self, x: Tensor, spec: QuantSpec, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> QuantTensor:
        with torch.no_grad():
            blocks = _Blocks.of(split_tiles(x, spec, global_scale, name), spec)
            if len(blocks.values) < 2:
                return super().quantise(x, spec, global_scale=global_scale, name=name)
            codes = _codes(spec, blocks.multiply, x.device, self.insist)(blocks.values, blocks.scale)
            codes = codes.view(blocks.tiles.values.shape)
            return join_tiles(codes, blocks.scales, blocks.tiles, spec, tuple(x.shape))

    def fake_quantise(self, x: Tensor, spec: QuantSpec, *, name: str = "tensor") -> Tensor:
        check_dtype(x, name)
        with torch.no_grad():
            blocks = _Blocks.of(split_tiles(x, spec, None, name), spec)
            if len(blocks.values) < 2:
                return super().fake_quantise(x, spec, name=name)
            y = _values(spec, blocks.multiply, x.dtype, x.device, self.insist)(*blocks.arguments(x.device))
            return untile(y.view(blocks.tiles.values.shape), spec, tuple(x.shape))

    def quantise_with_payload(
        self, x: Tensor, spec: QuantSpec, bits: PayloadBits, *, global_scale: Tensor | None = None, name: str = "tensor"
    ) -> tuple[QuantTensor, Payload]:
        check_bits(bits)
        q = self.quantise(x, spec, global_scale=global_scale, name=name)
        return q, payload_of(q, bits)

    def guided_round(
        self, x: Tensor, payload: Payload, *, shift: float = 1.0, guided: Tensor | None = None, name: str = "tensor"
    ) -> Tensor:
        rows = check_guided(x, payload, shift, guided, name)
        check_input(x, payload.spec, name)
        with torch.no_grad():
            if payload.scales.numel() < 2:
                return super().guided_round(x, payload, shift=shift, guided=guided, name=name)
            multiply, arguments = _guided_arguments(x, payload)
            function = _guided(payload.spec, payload.bits, shift, multiply, x.dtype, x.device, self.insist)
            y = function(*arguments).view(x.shape)
            return (
                y
                if rows is None
                else torch.where(rows.unsqueeze(-1), y, self.fake_quantise(x, payload.spec, name=name))
            )


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Tiles as a list of N blocks: ``values [N, elements]`` float32; ``scale``, ``s``, ``g`` ``[N, 1]``, see ``GuidedBlocks``."""

    tiles: Tiles
    scales: Tensor
    values: Tensor
    scale: Tensor
    s: Tensor
    multiply: bool

    @staticmethod
    def of(tiles: Tiles, spec: QuantSpec) -> _Blocks:
        scales = block_scales(tiles, spec)
        s = decode_scales(scales, spec)
        scale, multiply = element_scales(s, tiles.g, tiles.inverse, spec)
        values = tiles.values.flatten(0, -2) if tiles.values.numel() else tiles.values.new_empty(0, 1)
        return _Blocks(tiles, scales, values, _column(scale, s), _column(s, s), multiply)

    def arguments(self, device: torch.device) -> tuple[Tensor, ...]:
        return self.values, self.scale, self.s, _column(self.tiles.g, self.tiles.amax), _table(device)


def _column(t: Tensor, like: Tensor) -> Tensor:
    return t.expand(like.shape).reshape(-1, 1)


@cache
def _table(device: torch.device) -> Tensor:
    """The values of codes 0..15."""
    return decode_e2m1(torch.arange(16, dtype=torch.uint8, device=device))


@cache
def _grid(device: torch.device) -> Tensor:
    return SIGNED_GRID.to(device)


def _choices(spec: QuantSpec) -> tuple[str, ...]:
    """What the spec decides below the level of block scales: specs that agree in it share what was compiled."""
    return spec.ties, spec.zero_sign, spec.overflow


def _codes(spec: QuantSpec, multiply: bool, device: torch.device, insist: bool) -> Function:
    def codes(values: Tensor, scale: Tensor) -> Tensor:
        return round_elements(apply_scales(values, scale, multiply), spec)

    def arguments() -> tuple[Tensor, ...]:
        return _probe(spec, torch.float32, device)[:2]

    key = ("quantise", _choices(spec), multiply, device)
    return compile_exactly(key, f"quantise ({spec.name}, {device})", codes, arguments, insist=insist)


def _values(spec: QuantSpec, multiply: bool, dtype: torch.dtype, device: torch.device, insist: bool) -> Function:
    def values_of(values: Tensor, scale: Tensor, s: Tensor, g: Tensor, table: Tensor) -> Tensor:
        codes = round_elements(apply_scales(values, scale, multiply), spec)
        return ((table[codes.long()] * s) * g).to(dtype)

    key, name = (
        ("fake_quantise", _choices(spec), multiply, dtype, device),
        f"fake_quantise ({spec.name}, {dtype}, {device})",
    )
    return compile_exactly(key, name, values_of, lambda: _probe(spec, dtype, device), insist=insist)


def _probe(spec: QuantSpec, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    spec = probe.by_rows(spec)
    blocks = _Blocks.of(split_tiles(probe.values(dtype, device), spec, None, "probe"), spec)
    _, *others = blocks.arguments(device)
    return probe.near_ties(blocks.values, blocks.scale, blocks.multiply), *others


def _guided_arguments(x: Tensor, payload: Payload) -> tuple[bool, tuple[Tensor, ...]]:
    blocks, block = GuidedBlocks.of(x, payload), payload.spec.block
    columns = (_column(t, blocks.s) for t in (blocks.scale, blocks.s, blocks.g))
    codes = payload.codes.reshape(-1, block * payload.bits // 8)
    return blocks.multiply, (x.reshape(-1, block), codes, *columns, _grid(x.device))


def _guided(
    spec: QuantSpec,
    bits: PayloadBits,
    shift: float,
    multiply: bool,
    dtype: torch.dtype,
    device: torch.device,
    insist: bool,
) -> Function:
    def guided(tiles: Tensor, codes: Tensor, scale: Tensor, s: Tensor, g: Tensor, grid: Tensor) -> Tensor:
        return round_towards(tiles, codes, scale, s, g, grid, spec, bits, multiply, shift)

    def arguments() -> tuple[Tensor, ...]:
        x = probe.values(dtype, device)
        payload = payload_of(quantise(x.roll(1, dims=-1), probe.by_rows(spec), name="probe"), bits)  # of other numbers
        tiles, codes, scale, *others = _guided_arguments(x, payload)[1]
        return probe.near_ties(tiles, scale, multiply), codes, scale, *others

    name = f"guided_round ({spec.name}, {bits} bits, shift {shift:g}, {dtype}, {device})"
    rule = _choices(spec) if shift == 0 else None  # only rounding to nearest asks
    return compile_exactly(
        ("guided_round", rule, bits, shift, multiply, dtype, device), name, guided, arguments, insist=insist
    )
