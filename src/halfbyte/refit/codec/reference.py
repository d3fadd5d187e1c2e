"""The reference implementation of the codec's kernels: numpy, by the definitions of the format page."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import Element
from halfbyte.refit.codec.kernels import Marked

__all__ = ["ReferenceCodec", "elements_of", "positions_of_gaps", "rank", "unrank"]

_ESCAPE = 15
_SKIP = 255
#: Unsigned integers of some width.
Unsigned = npt.NDArray[Any]


def elements_of(element: Element, data: Bytes) -> Unsigned:
    """One unsigned integer an element: a view, or a copy for 4-bit codes."""
    if element.bits != 4:
        return data.view(element.unsigned)
    codes = np.empty(2 * data.size, np.uint8)
    codes[0::2], codes[1::2] = data & 15, data >> 4
    return codes


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
    sign, ones = _constants(element)
    return bits ^ np.where(bits & sign, ones, sign)


def unrank(element: Element, ranks: Unsigned) -> Unsigned:
    """Inverse of :func:`rank`."""
    if not element.signed_magnitude:
        return ranks
    sign, ones = _constants(element)
    return ranks ^ np.where(ranks & sign, sign, ones)


def positions_of_gaps(gaps: Bytes) -> npt.NDArray[np.int64]:
    """Element numbers that a gap stream marks."""
    marks = gaps != _SKIP
    ends = np.cumsum(gaps.astype(np.int64) + marks)
    return ends[marks] - 1


def gaps_of_positions(positions: npt.NDArray[np.int64]) -> Bytes:
    """The gap stream that marks ascending element numbers."""
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // _SKIP
    out = np.full(positions.size + int(skips.sum()), _SKIP, np.uint8)
    out[np.cumsum(skips + 1) - 1] = gaps % _SKIP
    return out


class ReferenceCodec:
    """``CodecKernels`` in numpy; the docstrings are the protocol's."""

    @property
    def name(self) -> str:
        return "reference"

    def sparse(self, element: Element, base: Bytes, target: Bytes, most: int) -> Marked | None:
        old, new = elements_of(element, base), elements_of(element, target)
        positions = np.flatnonzero(old != new)
        if positions.size > most:
            return None
        return Marked(positions.size, gaps_of_positions(positions), *_values(element, old[positions], new[positions]))

    def bitmask(self, element: Element, base: Bytes, target: Bytes) -> Marked:
        old, new = elements_of(element, base), elements_of(element, target)
        marks = old != new
        mask = np.packbits(marks, bitorder="little")
        return Marked(int(marks.sum()), mask, *_values(element, old[marks], new[marks]))

    def is_fill(self, element: Element, target: Bytes) -> bool:
        elements = elements_of(element, target)
        return bool((elements == elements[0]).all())

    def xor(self, element: Element, base: Bytes, target: Bytes) -> Bytes:
        return np.ascontiguousarray((base ^ target).reshape(-1, element.size).T).reshape(-1)

    def check_sparse(self, element: Element, marked: Marked, elements: int) -> bool:
        marks = marked.where != _SKIP
        inside = int(marked.where.sum(dtype=np.int64)) + int(marks.sum()) <= elements
        ends_marked = marked.where.size == 0 or bool(marks[-1])
        return inside and ends_marked and int(marks.sum()) == marked.changed and _values_agree(element, marked)

    def check_bitmask(self, element: Element, marked: Marked, elements: int) -> bool:
        bits = np.unpackbits(marked.where, bitorder="little")
        inside = bits.size >= elements and not bits[elements:].any()
        return inside and int(bits.sum()) == marked.changed and _values_agree(element, marked)

    def apply_sparse(self, element: Element, data: Bytes, marked: Marked) -> Bytes:
        return _apply(element, data, positions_of_gaps(marked.where), marked)

    def apply_bitmask(self, element: Element, data: Bytes, marked: Marked) -> Bytes:
        return _apply(element, data, _positions_of_mask(marked.where), marked)

    def apply_xor(self, element: Element, data: Bytes, planes: Bytes) -> None:
        data ^= planes.reshape(element.size, -1).T.reshape(-1)

    def revert_sparse(self, element: Element, data: Bytes, gaps: Bytes, old: Bytes) -> None:
        _put(element, data, positions_of_gaps(gaps), old)

    def revert_bitmask(self, element: Element, data: Bytes, mask: Bytes, old: Bytes) -> None:
        _put(element, data, _positions_of_mask(mask), old)


def _constants(element: Element) -> tuple[Any, Any]:
    kind = element.unsigned.type
    return kind(1 << element.bits - 1), kind((1 << element.bits) - 1)


def _positions_of_mask(mask: Bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def _values(element: Element, old: Unsigned, new: Unsigned) -> tuple[Bytes, Bytes]:
    """(values, wide) of elements that all differ."""
    sign, ones = _constants(element)
    difference = rank(element, new) - rank(element, old) & ones
    zigzag = ((difference << 1) ^ np.where(difference & sign, ones, ones ^ ones)) & ones
    escaped = zigzag > _ESCAPE
    codes = np.where(escaped, _ESCAPE, zigzag - np.where(escaped, 0, 1).astype(zigzag.dtype)).astype(np.uint8)
    codes = np.append(codes, np.zeros(codes.size % 2, np.uint8))
    return codes[0::2] | codes[1::2] << 4, np.ascontiguousarray(zigzag[escaped]).view(np.uint8)


def _codes(marked: Marked) -> Bytes:
    codes = np.empty(2 * marked.values.size, np.uint8)
    codes[0::2], codes[1::2] = marked.values & 15, marked.values >> 4
    return codes


def _values_agree(element: Element, marked: Marked) -> bool:
    codes = _codes(marked)
    lengths = codes.size == marked.changed + marked.changed % 2 and marked.wide.size % element.size == 0
    if not lengths or codes[marked.changed :].any():
        return False
    escapes = int((codes[: marked.changed] == _ESCAPE).sum())
    wide = marked.wide.view(element.unsigned)
    return escapes == wide.size and bool((wide > _ESCAPE).all()) and bool((wide <= _constants(element)[1]).all())


def _apply(element: Element, data: Bytes, positions: npt.NDArray[np.int64], marked: Marked) -> Bytes:
    elements = elements_of(element, data)
    old = elements[positions]
    _, ones = _constants(element)
    codes = _codes(marked)[: marked.changed]
    zigzag = codes.astype(element.unsigned) + element.unsigned.type(1)
    zigzag[codes == _ESCAPE] = marked.wide.view(element.unsigned)
    difference = (zigzag >> 1) ^ np.where(zigzag & 1, ones, ones ^ ones)
    elements[positions] = unrank(element, rank(element, old) + difference & ones)
    if element.bits == 4:
        store(element, data, elements)
    return old.view(np.uint8)


def _put(element: Element, data: Bytes, positions: npt.NDArray[np.int64], old: Bytes) -> None:
    elements = elements_of(element, data)
    elements[positions] = old.view(element.unsigned)
    if element.bits == 4:
        store(element, data, elements)
