"""Elements, gaps and codes as numpy integers: what the reference implementation is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import Element

__all__ = [
    "ESCAPE",
    "SKIP",
    "Unsigned",
    "constants",
    "elements_of",
    "gaps_of_positions",
    "join_codes",
    "positions_of_gaps",
    "rank",
    "split_codes",
    "store",
    "unrank",
]

#: A value that is in the wide stream.
ESCAPE = 15
#: A gap byte that skips and marks nothing.
SKIP = 255
#: Unsigned integers of some width.
Unsigned = npt.NDArray[Any]


def elements_of(element: Element, data: Bytes) -> Unsigned:
    """One unsigned integer an element: a view, or a copy for 4-bit codes."""
    if element.bits != 4:
        return data.view(element.unsigned)
    return split_codes(data)


def store(element: Element, data: Bytes, elements: Unsigned) -> None:
    """Write elements back into the bytes they came from."""
    if element.bits == 4:
        data[:] = elements[0::2] | elements[1::2] << 4
    else:
        data[:] = elements.view(np.uint8)


def rank(element: Element, bits: Unsigned) -> Unsigned:
    """Place of each pattern in the order of its values (``element.py``)."""
    if not element.signed_magnitude:
        return bits
    sign, ones = constants(element)
    ranks: Unsigned = bits ^ np.where(bits & sign, ones, sign)
    return ranks


def unrank(element: Element, ranks: Unsigned) -> Unsigned:
    """Inverse of :func:`rank`."""
    if not element.signed_magnitude:
        return ranks
    sign, ones = constants(element)
    bits: Unsigned = ranks ^ np.where(ranks & sign, sign, ones)
    return bits


def positions_of_gaps(gaps: Bytes) -> npt.NDArray[np.int64]:
    """Element numbers that a gap stream marks."""
    marks = gaps != SKIP
    ends = np.cumsum(gaps.astype(np.int64) + marks)
    positions: npt.NDArray[np.int64] = ends[marks] - 1
    return positions


def gaps_of_positions(positions: npt.NDArray[np.int64]) -> Bytes:
    """The gap stream that marks ascending element numbers."""
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // SKIP
    out = np.full(positions.size + int(skips.sum()), SKIP, np.uint8)
    out[np.cumsum(skips + 1) - 1] = gaps % SKIP
    return out


def split_codes(values: Bytes) -> Bytes:
    """4-bit codes, one a byte."""
    codes = np.empty(2 * values.size, np.uint8)
    codes[0::2], codes[1::2] = values & 15, values >> 4
    return codes


def join_codes(codes: Bytes) -> Bytes:
    """Codes two a byte, the first in the low half; an odd one has a zero beside it."""
    codes = np.append(codes, np.zeros(codes.size % 2, np.uint8))
    joined: Bytes = codes[0::2] | codes[1::2] << np.uint8(4)
    return joined


def constants(element: Element) -> tuple[Any, Any]:
    """(sign bit, all ones) in the element's type."""
    kind = element.unsigned.type
    return kind(1 << element.bits - 1), kind((1 << element.bits) - 1)
