"""Elements: width, and the order in which the bit patterns of a dtype are counted.

A change is written as a difference of integers, so each pattern needs a rank. Floats are ranked by value with the sign
folded in (sign-magnitude to two's complement), so that +0 and -0, subnormals, Inf and every NaN payload are neighbours
of what they are next to, and all 2**bits patterns have different ranks. Integers and scales are ranked as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import DTYPE_BITS

__all__ = ["ELEMENTS", "Element", "element_of"]


@dataclass(frozen=True)
class Element:
    """How the codec sees one dtype.

    ``exponent``: bits of the pattern, as (lowest, how many), that number its class in the ``max`` profile: the exponent, of
    F64 its low eight bits; (0, 0) puts every element into one class. ``code`` is the dtype's number in the format, never reused.
    """

    dtype: str
    code: int
    bits: int
    signed_magnitude: bool
    exponent: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        """Bytes of an element by itself (one for a 4-bit code)."""
        return max(1, self.bits // 8)

    @property
    def unsigned(self) -> np.dtype[np.unsignedinteger]:
        """The numpy type of an element by itself."""
        return np.dtype(f"<u{self.size}")

    def bytes_of(self, elements: int) -> int:
        """Bytes of that many elements side by side."""
        return elements * self.bits // 8


_FLOATS = {
    "F16": (10, 5), "BF16": (7, 8), "F32": (23, 8), "F64": (52, 8), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5), "F4": (1, 2),
}  # fmt: skip
_CODES = {
    "BOOL": 1, "U8": 2, "I8": 3, "F8_E4M3": 4, "F8_E5M2": 5, "F8_E8M0": 6, "F4": 7, "U16": 8, "I16": 9, "F16": 10,
    "BF16": 11, "U32": 12, "I32": 13, "F32": 14, "U64": 15, "I64": 16, "F64": 17, "C64": 18,
}  # fmt: skip

#: Dtype name -> element.
ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        dtype: Element(dtype, _CODES[dtype], bits, dtype in _FLOATS, _FLOATS.get(dtype, (0, 0)))
        for dtype, bits in DTYPE_BITS.items()
    }
)


def element_of(dtype: str) -> Element:
    """The element of a safetensors dtype name.

    Raises:
        RefitError: unknown.
    """
    if dtype not in ELEMENTS:
        raise RefitError(f"unknown dtype {dtype!r}", expected="one of " + ", ".join(ELEMENTS))
    return ELEMENTS[dtype]
