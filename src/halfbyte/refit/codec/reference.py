"""The reference implementation of the codec's kernels: numpy, by the definitions of the format page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import Element
from halfbyte.refit.codec.integers import (
    ESCAPE,
    SKIP,
    Unsigned,
    constants,
    elements_of,
    gaps_of_positions,
    join_codes,
    positions_of_gaps,
    rank,
    split_codes,
    store,
    unrank,
)
from halfbyte.refit.codec.kernels import Classed, Marked, Room, Units
from halfbyte.refit.codec.reference_classes import from_classes, to_classes, values_agree

__all__ = ["ReferenceCodec"]


class ReferenceCodec:
    """``CodecKernels`` in numpy; the docstrings are the protocol's."""

    @property
    def name(self) -> str:
        return "reference"

    def sparse(
        self, element: Element, base: Bytes, target: Bytes, most: int, room: Room | None = None
    ) -> Marked | None:
        old, new = elements_of(element, base), elements_of(element, target)
        positions = np.flatnonzero(old != new)
        if positions.size > most:
            return None
        return Marked(positions.size, gaps_of_positions(positions), *_values(element, old[positions], new[positions]))

    def bitmask(self, element: Element, base: Bytes, target: Bytes, room: Room | None = None) -> Marked:
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
        marks = marked.where != SKIP
        inside = int(marked.where.sum(dtype=np.int64)) + int(marks.sum()) <= elements
        ends_marked = marked.where.size == 0 or bool(marks[-1])
        return inside and ends_marked and int(marks.sum()) == marked.changed and values_agree(element, marked)

    def check_bitmask(self, element: Element, marked: Marked, elements: int) -> bool:
        bits = np.unpackbits(marked.where, bitorder="little")
        inside = bits.size >= elements and not bits[elements:].any()
        return inside and int(bits.sum()) == marked.changed and values_agree(element, marked)

    def apply_sparse(self, element: Element, data: Bytes, marked: Marked, old: Bytes | None = None) -> Bytes:
        return _kept(_apply(element, data, positions_of_gaps(marked.where), marked), old)

    def apply_bitmask(self, element: Element, data: Bytes, marked: Marked, old: Bytes | None = None) -> Bytes:
        return _kept(_apply(element, data, _positions_of_mask(marked.where), marked), old)

    def patch_sparse(self, element: Element, data: Bytes, marked: Marked) -> Units:
        return _patch(element, data, positions_of_gaps(marked.where), marked)

    def patch_bitmask(self, element: Element, data: Bytes, marked: Marked) -> Units:
        return _patch(element, data, _positions_of_mask(marked.where), marked)

    def differences(self, unit: int, before: Bytes, after: Bytes, most: int) -> Units | None:
        kind = np.dtype(f"<u{unit}")
        old, new = before.view(kind), after.view(kind)
        positions = np.flatnonzero(old != new)
        if positions.size > most:
            return None
        return Units(positions.astype(np.uint32), old[positions], new[positions])

    def put(
        self,
        data: Bytes,
        positions: npt.NDArray[np.uint32],
        values: npt.NDArray[np.unsignedinteger],
        expect: npt.NDArray[np.unsignedinteger] | None = None,
    ) -> int:
        units = data.view(values.dtype)
        if positions.size and int(positions.max()) >= units.size:
            return -1
        wrong = 0 if expect is None else int((units[positions] != expect).sum())
        if not wrong:
            units[positions] = values
        return wrong

    def apply_xor(self, element: Element, data: Bytes, planes: Bytes) -> None:
        data ^= planes.reshape(element.size, -1).T.reshape(-1)

    def revert_sparse(self, element: Element, data: Bytes, gaps: Bytes, old: Bytes) -> None:
        _put(element, data, positions_of_gaps(gaps), old)

    def revert_bitmask(self, element: Element, data: Bytes, mask: Bytes, old: Bytes) -> None:
        _put(element, data, _positions_of_mask(mask), old)

    def to_classes(self, element: Element, base: Bytes, marked: Marked) -> Classed:
        return to_classes(element, base, marked)

    def from_classes(self, element: Element, base: Bytes, classed: Classed) -> Marked | None:
        return from_classes(element, base, classed)


def _kept(values: Bytes, room: Bytes | None) -> Bytes:
    if room is None:
        return values
    room[:] = values
    return room


def _positions_of_mask(mask: Bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def _values(element: Element, old: Unsigned, new: Unsigned) -> tuple[Bytes, Bytes]:
    """(values, wide) of elements that all differ."""
    sign, ones = constants(element)
    difference = rank(element, new) - rank(element, old) & ones
    zigzag = ((difference << 1) ^ np.where(difference & sign, ones, ones ^ ones)) & ones
    escaped = zigzag > ESCAPE
    codes = np.where(escaped, ESCAPE, zigzag - np.where(escaped, 0, 1).astype(zigzag.dtype)).astype(np.uint8)
    return join_codes(codes), np.ascontiguousarray(zigzag[escaped]).view(np.uint8)


def _apply(element: Element, data: Bytes, positions: npt.NDArray[np.int64], marked: Marked) -> Bytes:
    elements = elements_of(element, data)
    old = elements[positions]
    _, ones = constants(element)
    codes = split_codes(marked.values)[: marked.changed]
    zigzag = codes.astype(element.unsigned) + element.unsigned.type(1)
    zigzag[codes == ESCAPE] = marked.wide.view(element.unsigned)
    difference = (zigzag >> 1) ^ np.where(zigzag & 1, ones, ones ^ ones)
    elements[positions] = unrank(element, rank(element, old) + difference & ones)
    if element.bits == 4:
        store(element, data, elements)
    return old.view(np.uint8)


def _patch(element: Element, data: Bytes, positions: npt.NDArray[np.int64], marked: Marked) -> Units:
    old = _apply(element, data, positions, marked).view(element.unsigned)
    return Units(positions.astype(np.uint32), old, elements_of(element, data)[positions])


def _put(element: Element, data: Bytes, positions: npt.NDArray[np.int64], old: Bytes) -> None:
    elements = elements_of(element, data)
    elements[positions] = old.view(element.unsigned)
    if element.bits == 4:
        store(element, data, elements)
