"""``Payload``: what a learner is told about the codes that the rollout used (TRACE, arXiv 2610.07767)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError, SpecMismatchError
from halfbyte.formats.packing import unpack_codes
from halfbyte.formats.residues import PayloadBits, check_bits, pack_residues, residues, unpack_residues
from halfbyte.formats.spec import QuantSpec, first_difference
from halfbyte.formats.tensor import QuantTensor
from halfbyte.formats.validate import validate_parts

__all__ = ["Payload", "payload_bytes", "payload_codes", "payload_of"]


@dataclass(frozen=True, eq=False)
class Payload:
    """The guidance of a tensor of logical shape ``shape`` = [..., K].

    Arguments:
        codes: uint8 [..., K * bits / 8], the residues of the rollout's codes (see :mod:`halfbyte.formats.residues`).
        scales: uint8 [..., K / block], the rollout's block scales as it stored them.
        global_scale: float32, shape () or [...], in the spec's convention.
        spec: the rule the rollout quantised with.
        bits: 4, 2 or 1 a value.
        shape: logical shape.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    spec: QuantSpec
    bits: PayloadBits
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale; equal to :func:`payload_bytes`."""
        return self.codes.nbytes + self.scales.nbytes + self.global_scale.nbytes

    def residues(self) -> Tensor:
        """uint8 [..., K], one value below ``2 ** bits`` a code."""
        return unpack_residues(self.codes, self.bits)

    def quantised(self) -> QuantTensor:
        """The rollout's tensor itself, without a copy.

        Raises:
            NumericsError: fewer than 4 bits do not hold it.
        """
        if self.bits != 4:
            raise NumericsError(
                f"{self.bits} bits a value do not hold the rollout's codes", expected="a payload of 4 bits"
            )
        return QuantTensor(self.codes, self.scales, self.global_scale, self.spec, self.shape)

    def select(self, rows: Tensor) -> Payload:
        """The entries ``rows`` (int64) of the first dimension."""
        # index_select copies whole rows; indexing goes byte by byte
        codes, scales, g = self.codes.index_select(0, rows), self.scales.index_select(0, rows), self.global_scale
        g = g if g.dim() == 0 else g.index_select(0, rows)
        return Payload(codes, scales, g, self.spec, self.bits, (len(rows), *self.shape[1:]))

    def check(self, name: str = "guidance") -> Payload:
        """The payload, or the error that says why no quantiser of ours can have written it.

        Raises:
            ConfigError, ShapeError, NumericsError: as :func:`halfbyte.formats.validate`.
        """
        check_bits(self.bits)
        k = self.shape[-1] if self.shape else 0
        if self.codes.dtype != torch.uint8 or tuple(self.codes.shape) != (*self.shape[:-1], k * self.bits // 8):
            raise ShapeError(
                f"{name}: codes {tuple(self.codes.shape)} {self.codes.dtype} do not fit",
                where=f"shape {self.shape}, {self.bits} bits",
                expected=f"uint8 {(*self.shape[:-1], k * self.bits // 8)}",
            )
        full = self.codes if self.bits == 4 else self.codes.new_zeros((*self.shape[:-1], k // 2))
        validate_parts(full, self.scales, self.global_scale, self.spec, self.shape, name)
        return self

    @staticmethod
    def concat(parts: Sequence[Payload]) -> Payload:
        """Payloads of one spec and width, one after another along the first dimension.

        Raises:
            ShapeError: no parts, or parts whose other dimensions differ.
            SpecMismatchError: parts of different specs, bits or (constant) global scales.
        """
        if not parts:
            raise ShapeError("there is no guidance to concatenate", expected="at least one payload")
        first = parts[0]
        for part in parts[1:]:
            difference = first_difference(first.spec, part.spec)
            if difference is None and first.bits != part.bits:
                difference = f"bits: {first.bits} != {part.bits}"
            constant = first.global_scale.dim() == 0
            if difference is None and constant and not torch.equal(first.global_scale, part.global_scale):
                difference = "global_scale of one of them"
            if difference is not None:
                raise SpecMismatchError("guidance of different rules", where=difference, expected="one rule")
            if part.shape[1:] != first.shape[1:]:
                raise ShapeError("guidance of different tensors", where=f"{first.shape} and {part.shape}")
        g = first.global_scale if first.global_scale.dim() == 0 else torch.cat([p.global_scale for p in parts])
        return Payload(
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scales for p in parts]),
            g,
            first.spec,
            first.bits,
            (sum(p.shape[0] for p in parts), *first.shape[1:]),
        )


def payload_codes(codes: Tensor, bits: PayloadBits) -> Tensor:
    """Packed codes uint8 [..., K / 2] to packed residues uint8 [..., K * bits / 8]; 4 bits are the codes themselves."""
    return codes if bits == 4 else pack_residues(residues(unpack_codes(codes), bits), bits)


def payload_of(q: QuantTensor, bits: PayloadBits) -> Payload:
    """The guidance that a quantised tensor gives. 4 bits share its memory."""
    return Payload(payload_codes(q.codes, check_bits(bits)), q.scales, q.global_scale, q.spec, bits, q.shape)


def payload_bytes(shape: Sequence[int], spec: QuantSpec, bits: PayloadBits) -> int:
    """Bytes of a payload: a value takes ``bits / 8 + 1 / block`` (the paper's n * (b + .5) / 8 for NVFP4), and the global scale
    4 for each row where the spec takes one a token, else 4 in all."""
    n, rows = prod(shape), prod(shape[:-1])
    return n * bits // 8 + n // spec.block + 4 * (rows if spec.global_scale == "token" else 1)
