"""``QuantSpec``: every numeric choice of a 4-bit format, in one hashable, serialisable record.

There is no single NVFP4: libraries agree on the bits and differ in the arithmetic that leads to them (see
docs/methods, section 1). A spec states each of those choices as a field, travels with checkpoints, refits and
trajectories, and two parts of a run that differ in any field refuse to work together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from halfbyte.errors import ConfigError

__all__ = ["QuantSpec", "first_difference"]

Format = Literal["nvfp4", "mxfp4"]
GlobalMode = Literal["tensor", "token", "constant", "none"]
GlobalRounding = Literal["none", "power_of_two"]
GlobalConvention = Literal["multiplier", "reciprocal", "amax"]
Arithmetic = Literal["fp32", "input"]
Division = Literal["divide", "reciprocal"]
BlockScale = Literal["divide", "divide_product", "multiply_inverse"]
ElementScale = Literal["divide_product", "reciprocal_global", "reciprocal_product", "divide_ratio"]
Ties = Literal["even", "toward_zero", "away"]
ZeroSign = Literal["positive", "keep", "negative", "nonpositive"]
Overflow = Literal["saturate", "wrap"]
FourOverSix = Literal["none", "mse"]
GlobalUpdate = Literal["recompute", "frozen", "hysteretic"]
MxScale = Literal["floor", "even", "rceil", "modelopt", "naive"]


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor becomes 4-bit codes and scales.

    Two specs are equal when every field but ``name`` is equal: a name is a label, not a choice.

    Arguments:
        name: label for people.
        format: ``nvfp4`` (E2M1 codes, blocks of 16, E4M3 scales, fp32 global scale) or ``mxfp4`` (blocks of 32, E8M0
            scales, no global scale; OCP Microscaling specification 1.0).
        global_scale: where the global scale comes from: ``tensor`` (amax of the whole tensor), ``token`` (amax of each
            row of the last dimension), ``constant`` (the field ``constant``), ``none`` (1).
        constant: the global scale of mode ``constant``, as a multiplier.
        global_rounding: ``none``, or ``power_of_two``: the smallest power of two >= amax / (6 * scale_max).
        global_convention: what is stored: the ``multiplier`` g of value = grid * e4m3 * g, its ``reciprocal``
            g' = 6 * scale_max / amax, or ``amax`` itself (g' = 6 * scale_max / amax and g = 1 / g', each rounded).
        global_division: ``divide``, or ``reciprocal``: multiply by a rounded reciprocal (6 * scale_max * (1 / amax)).
        global_update: what later versions of a tensor do about it: ``recompute``, ``frozen`` or ``hysteretic``, see
            :mod:`halfbyte.formats.stable_scale`. A tensor quantised alone is the first version.
        zero_global: the global scale stored for an all-zero tensor: 1, or 0 as libraries that store amax / 2688 do.
        arithmetic: dtype of block amax / 6 and of the global scale: ``fp32``, or ``input`` (BF16 for a BF16 tensor).
        amax_division: block amax / 6 by ``divide``, or amax * (1/6) by ``reciprocal``.
        block_scale: fp32 order of the E4M3 scale before it is rounded: ``divide`` (amax/6) / g; ``divide_product``
            amax / (6 * g); ``multiply_inverse`` (amax/6) * g'.
        scale_floor: smallest E4M3 scale written (0 = none); applied before rounding.
        zero_scale: E4M3 scale written where the rule gives zero, before or after rounding (0 = keep the zero; all codes
            of that block are then 0).
        scale_max: largest E4M3 scale used to derive the global scale (448; 256 leaves room for four-over-six).
        element_scale: fp32 order of the element before rounding, with s the E4M3 scale: ``divide_product`` x / (s * g);
            ``reciprocal_global`` x * (g' / s); ``reciprocal_product`` x * (1 / (g * s)); ``divide_ratio`` x / (s / g').
        ties: E2M1 rounding of a value halfway between two grid points: to the ``even`` code, ``toward_zero``, ``away``.
        zero_sign: which values that round to zero get code 8 (-0) instead of code 0: none (``positive``), those with
            the sign bit (``keep``), those < 0 (``negative``), those <= 0 (``nonpositive``: even +0).
        overflow: a value beyond the grid (a block whose scale was rounded down a lot) is written as 6 (``saturate``),
            or as code 8 from 7 upwards (``wrap``: what fouroversix 1.0.5 does; here only to reproduce it).
        four_over_six: ``none``, or ``mse``: per block, map amax to 4 instead of 6 when that lowers the squared error
            (arXiv 2512.02010).
        mx_scale: E8M0 exponent rule, see :func:`halfbyte.formats.block_scale.e8m0_bytes`.
        scale_rows: rows that share one scale: 1, or 16 for 2-D 16x16 weight scales (arXiv 2509.25149).
    """

    name: str = field(default="custom", compare=False)
    format: Format = "nvfp4"
    global_scale: GlobalMode = "tensor"
    constant: float = 1.0
    global_rounding: GlobalRounding = "power_of_two"
    global_convention: GlobalConvention = "multiplier"
    global_division: Division = "divide"
    global_update: GlobalUpdate = "recompute"
    zero_global: float = 1.0
    arithmetic: Arithmetic = "fp32"
    amax_division: Division = "divide"
    block_scale: BlockScale = "divide"
    scale_floor: float = 0.0
    zero_scale: float = 0.0
    scale_max: float = 448.0
    element_scale: ElementScale = "divide_product"
    ties: Ties = "even"
    zero_sign: ZeroSign = "positive"
    overflow: Overflow = "saturate"
    four_over_six: FourOverSix = "none"
    mx_scale: MxScale = "floor"
    scale_rows: Literal[1, 16] = 1

    def __post_init__(self) -> None:
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                self._reject(f"field {key!r} is {getattr(self, key)!r}", "one of " + ", ".join(map(repr, allowed)))
        for key, low, high in (("constant", 2.0**-126, 2.0**116), ("scale_max", 2.0**-9, 448.0)):
            if not low <= getattr(self, key) <= high:
                self._reject(f"field {key!r} is {getattr(self, key)!r}", f"a number from {low} to {high}")
        for key in ("scale_floor", "zero_scale"):
            if not 0.0 <= getattr(self, key) <= 448.0:
                self._reject(f"field {key!r} is {getattr(self, key)!r}", "a number from 0 to 448")
        if self.format == "mxfp4" and (
            self.global_scale != "none" or self.scale_rows != 1 or self.four_over_six != "none"
        ):
            self._reject(
                "MXFP4 has neither a global scale nor 2-D scales nor four-over-six",
                "global_scale='none', scale_rows=1, four_over_six='none'",
            )
        if self.global_update != "recompute" and self.global_scale != "tensor":
            self._reject(
                f"global_update = {self.global_update!r} with global_scale = {self.global_scale!r}",
                "global_scale = 'tensor': no other global scale depends on the version of a tensor",
            )
        if self.scale_rows != 1 and self.global_scale == "token":
            self._reject(
                "rows that share block scales cannot have a global scale each", "global_scale other than 'token'"
            )

    def _reject(self, what: str, expected: str) -> None:
        raise ConfigError(f"QuantSpec: {what}", where=f"spec {self.name!r}", expected=expected)

    @property
    def block(self) -> int:
        """Elements of the last dimension that share a scale: 16 (NVFP4) or 32 (MXFP4)."""
        return 16 if self.format == "nvfp4" else 32

    def replace(self, **changes: Any) -> QuantSpec:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> QuantSpec:
        """Inverse of :meth:`to_json`. Unknown or missing fields are a :class:`ConfigError`: a spec is never guessed."""
        known = {f.name for f in fields(QuantSpec)}
        unknown, missing = sorted(set(record) - known), sorted(known - set(record))
        if unknown or missing:
            raise ConfigError(
                "a stored QuantSpec does not have exactly the fields of this version",
                where=f"spec {record.get('name', '?')!r}",
                expected=f"missing {missing}, unknown {unknown}",
                fix="use the halfbyte version that wrote it",
            )
        return QuantSpec(**record)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "format": get_args(Format),
    "global_scale": get_args(GlobalMode),
    "global_rounding": get_args(GlobalRounding),
    "global_convention": get_args(GlobalConvention),
    "global_division": get_args(Division),
    "global_update": get_args(GlobalUpdate),
    "zero_global": (1.0, 0.0),
    "arithmetic": get_args(Arithmetic),
    "amax_division": get_args(Division),
    "block_scale": get_args(BlockScale),
    "element_scale": get_args(ElementScale),
    "ties": get_args(Ties),
    "zero_sign": get_args(ZeroSign),
    "overflow": get_args(Overflow),
    "four_over_six": get_args(FourOverSix),
    "mx_scale": get_args(MxScale),
    "scale_rows": (1, 16),
}


def first_difference(a: QuantSpec, b: QuantSpec) -> str | None:
    """Name of the first differing field with both values, or None when the specs are the same choice."""
    for f in fields(QuantSpec):
        if f.compare and getattr(a, f.name) != getattr(b, f.name):
            return f"{f.name}: {getattr(a, f.name)!r} != {getattr(b, f.name)!r}"
    return None
