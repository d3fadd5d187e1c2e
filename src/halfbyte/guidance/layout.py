"""How the guidance of one token lies in memory: one row of bytes, site behind site.

    codes | block scales | global scale       for each entry of the plan, keys and values behind everything else

Codes and scales are those of :mod:`halfbyte.guidance.payload`. The token's global scale is one byte where the spec's rule gives
powers of two (the exponent, biased by 127) and four (float32) where it does not; zero there says that nothing was recorded. A
constant global scale leaves one flag byte, and keys and values, which every token has, leave none: the formula's bytes exactly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import DataError, SpecMismatchError
from halfbyte.formats import PayloadBits, QuantSpec, first_difference
from halfbyte.formats.residues import check_bits
from halfbyte.guidance.plan import Plan
from halfbyte.guidance.sites import Place, places
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision

__all__ = ["Field", "Layout", "decode_global", "global_source"]


@dataclass(frozen=True)
class Field:
    """The bytes of one entry in a token's row: [start, stop), cut into codes, scales and global scale."""

    place: Place
    bits: PayloadBits
    start: int

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of the codes of a token."""
        return self.place.numbers * self.bits // 8

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of the block scales of a token."""
        return self.place.numbers // self.place.spec.block

    @cached_property
    def global_bytes(self) -> int:
        """Bytes of the global scales of a token (one scale a row)."""
        return 0 if self.place.site in ("k", "v") else self.place.rows * _global_width(self.place.spec)

    @cached_property
    def scales_at(self) -> int:
        """Where the block scales begin."""
        return self.start + self.code_bytes

    @cached_property
    def global_at(self) -> int:
        """Where the global scales begin."""
        return self.scales_at + self.scale_bytes

    @cached_property
    def stop(self) -> int:
        """Behind the last byte."""
        return self.global_at + self.global_bytes


@dataclass(frozen=True)
class Layout:
    """All fields of a plan, one behind the other."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, arch: Architecture, precision: Precision, plan: Plan) -> Layout:
        """The layout of a plan for a model and its rollout's precision; entries without a place there are left out."""
        found = {(p.layer, p.site): p for p in places(arch, precision)}
        known = [e for e in plan if (e.layer, e.site) in found]
        fields: list[Field] = []
        for entry in sorted(known, key=lambda e: e.site in ("k", "v")):
            place = found[entry.layer, entry.site]
            fields.append(Field(place, check_bits(entry.bits), fields[-1].stop if fields else 0))
        return cls(tuple(fields))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes a token."""
        return self.fields[-1].stop if self.fields else 0

    @cached_property
    def recorded_bytes(self) -> int:
        """Bytes a token of everything that the KV pages do not hold anyway; they come first in a row."""
        return next((f.start for f in self.kv_fields), self.row_bytes)

    @cached_property
    def by_place(self) -> dict[tuple[int, str], Field]:
        """(layer, site) -> field."""
        return {(f.place.layer, f.place.site): f for f in self.fields}

    @cached_property
    def kv_fields(self) -> tuple[Field, ...]:
        """The fields of keys and values."""
        return tuple(f for f in self.fields if f.place.site in ("k", "v"))

    def to_text(self) -> str:
        """A JSON text that travels with the rows; :meth:`from_text` restores it."""
        specs: list[QuantSpec] = []
        entries: list[list[Any]] = []
        for f in self.fields:
            if f.place.spec not in specs:
                specs.append(f.place.spec)
            p = f.place
            entries.append([p.layer, p.site, p.rows, p.width, specs.index(p.spec), f.bits])
        return json.dumps({"specs": [s.to_json() for s in specs], "entries": entries}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """The layout that :meth:`to_text` described.

        Raises:
            DataError: not such a text.
            ConfigError: a spec of another version.
        """
        try:
            data = json.loads(text)
            fields: list[Field] = []
            records = [(int(a), str(b), int(c), int(d), int(e), int(f)) for a, b, c, d, e, f in data["entries"]]
            specs = data["specs"]
            if not all(0 <= e < len(specs) for *_, e, _ in records):
                raise ValueError("an entry names a spec that is not there")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the layout of guidance cannot be read: {error}", expected="JSON of specs and entries"
            ) from error
        parsed = [QuantSpec.from_json(s) for s in specs]
        for layer, site, rows, width, spec, bits in records:
            fields.append(
                Field(Place(layer, site, rows, width, parsed[spec]), check_bits(bits), fields[-1].stop if fields else 0)
            )
        return cls(tuple(fields))

    def require_places(self, expected: tuple[Place, ...], where: str) -> None:
        """Refuse guidance that a learner whose quantisers sit at ``expected`` cannot use.

        Raises:
            SpecMismatchError: another QuantSpec or another shape at a site, naming the first difference.
        """
        own = {(p.layer, p.site): p for p in expected}
        for f in self.fields:
            p, mine = f.place, own.get((f.place.layer, f.place.site))
            if mine is None or p == mine:
                continue
            difference = first_difference(mine.spec, p.spec)
            raise SpecMismatchError(
                f"guidance for layer {p.layer} {p.site} was rounded by another rule: "
                + (difference or f"{p.rows} rows of {p.width} numbers, here {mine.rows} of {mine.width}"),
                where=where,
                expected="the QuantSpec that the learner rounds with",
                fix='set learner.precision = "same", or alignment.method = "none"',
            )


def _power_of_two(spec: QuantSpec) -> bool:
    return spec.global_rounding == "power_of_two" and spec.global_convention == "multiplier"


def _global_width(spec: QuantSpec) -> int:
    return 4 if spec.global_scale == "token" and not _power_of_two(spec) else 1


def global_source(global_scale: Tensor, spec: QuantSpec, tokens: int, rows: int) -> Tensor:
    """Global scales (float32, one a row, or one for all where the spec says so) as ``Kernels.store_parts`` takes them for
    ``tokens`` of ``rows`` rows each: exponents [tokens, rows] float32, bytes [tokens, rows * 4] or flags [tokens, rows]."""
    if spec.global_scale != "token":
        return torch.ones(tokens, rows, dtype=torch.uint8)
    g = global_scale.reshape(tokens, rows)
    return g if _power_of_two(spec) else g.contiguous().view(torch.uint8)


def decode_global(stored: Tensor, spec: QuantSpec) -> Tensor:
    """What was stored for :func:`global_source`: contiguous bytes [R, 1 or 4] -> float32 [R]; 0 where nothing was recorded."""
    if spec.global_scale != "token":
        g = torch.tensor(spec.constant if spec.global_scale == "constant" else 1.0)
        return torch.where(stored[:, 0] > 0, g, 0.0)
    if _power_of_two(spec):
        return (stored[:, 0].to(torch.int32) << 23).view(torch.float32)
    return stored.view(torch.float32).view(-1)
