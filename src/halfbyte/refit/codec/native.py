"""The native implementation of the codec's kernels, round ``halfbyte.kernels._native`` (``cpp/refit.cpp``).

Importing this module raises ImportError where the extension was not built.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.kernels import _native
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import Element
from halfbyte.refit.codec.kernels import Classed, Marked, Room, Units

__all__ = ["NativeCodec", "instruction_sets"]

_ISAS = ("generic", "avx2", "avx512")
_SLACK = 64  # bytes that the kernels may write past a stream (kRefitSlack)
_CLASS_HEAD = 2 + 6 * 256  # bytes: the classes' records
_MOST_LOW = 20  # bits
_HASHED = 241  # bytes from which on kernels hash blocks (kRefitHashed)


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets this processor can run, slowest first."""
    return _ISAS[: _native.best_isa() + 1]


def _kind(element: Element) -> int:
    return -element.bits if element.signed_magnitude else element.bits


class NativeCodec:
    """``CodecKernels`` in C++ for one instruction set; the docstrings are the protocol's."""

    def __init__(self, isa: str) -> None:
        self._name = isa
        self._isa = _ISAS.index(isa)

    @property
    def name(self) -> str:
        return self._name

    def sparse(
        self, element: Element, base: Bytes, target: Bytes, most: int, room: Room | None = None
    ) -> Marked | None:
        n = base.size * 8 // element.bits
        room, most = room or Room(), min(most, n)
        where = room.take("gaps", most + n // 255 + _SLACK)
        values, wide = room.take("sparse values", most + _SLACK), room.take("sparse wide", most * element.size)
        size, changed, escapes, hash_ = _native.refit_sparse(
            self._isa, _kind(element), base, target, most, where, values, wide
        )
        if changed < 0:
            return None
        known = hash_ if base.size >= _HASHED else None
        return Marked(changed, where[:size], values[: (changed + 1) // 2], wide[: escapes * element.size], known)

    def bitmask(self, element: Element, base: Bytes, target: Bytes, room: Room | None = None) -> Marked:
        n = base.size * 8 // element.bits
        room = room or Room()
        where = room.take("mask", n // 8 + 1 + _SLACK)
        values, wide = room.take("masked values", n + _SLACK), room.take("masked wide", n * element.size)
        size, changed, escapes = _native.refit_bitmask(self._isa, _kind(element), base, target, where, values, wide)
        return Marked(changed, where[:size], values[: (changed + 1) // 2], wide[: escapes * element.size])

    def is_fill(self, element: Element, target: Bytes) -> bool:
        return bool(_native.refit_is_fill(self._isa, _kind(element), target))

    def xor(self, element: Element, base: Bytes, target: Bytes) -> Bytes:
        planes = np.empty_like(base)
        _native.refit_xor(self._isa, element.size, base, target, planes)
        return planes

    def check_sparse(self, element: Element, marked: Marked, elements: int) -> bool:
        return self._check(element, marked, elements, mask=False)

    def check_bitmask(self, element: Element, marked: Marked, elements: int) -> bool:
        return self._check(element, marked, elements, mask=True)

    def apply_sparse(self, element: Element, data: Bytes, marked: Marked, old: Bytes | None = None) -> Bytes:
        return self._apply(element, data, marked, old, mask=False)

    def apply_bitmask(self, element: Element, data: Bytes, marked: Marked, old: Bytes | None = None) -> Bytes:
        return self._apply(element, data, marked, old, mask=True)

    def patch_sparse(self, element: Element, data: Bytes, marked: Marked) -> Units:
        return self._patch(element, data, marked, mask=False)

    def patch_bitmask(self, element: Element, data: Bytes, marked: Marked) -> Units:
        return self._patch(element, data, marked, mask=True)

    def differences(self, unit: int, before: Bytes, after: Bytes, most: int) -> Units | None:
        count = _native.refit_count_differing(self._isa, unit, before, after)
        if count > most:
            return None
        units = _units(count, np.dtype(f"<u{unit}"))
        _native.refit_find_differing(self._isa, unit, before, after, units.positions, units.old, units.new)
        return units

    def put(
        self,
        data: Bytes,
        positions: npt.NDArray[np.uint32],
        values: npt.NDArray[np.unsignedinteger],
        expect: npt.NDArray[np.unsignedinteger] | None = None,
    ) -> int:
        held = b"" if expect is None else expect
        return int(_native.refit_put(self._isa, values.itemsize, data, positions, values, held))

    def apply_xor(self, element: Element, data: Bytes, planes: Bytes) -> None:
        _native.refit_apply_xor(self._isa, element.size, data, planes)

    def revert_sparse(self, element: Element, data: Bytes, gaps: Bytes, old: Bytes) -> None:
        _native.refit_revert(self._isa, _kind(element), False, data, gaps, old)

    def revert_bitmask(self, element: Element, data: Bytes, mask: Bytes, old: Bytes) -> None:
        _native.refit_revert(self._isa, _kind(element), True, data, mask, old)

    def to_classes(self, element: Element, base: Bytes, marked: Marked) -> Classed:
        n, changed = base.size * 8 // element.bits, marked.changed
        values, wide = np.empty(changed + _SLACK, np.uint8), np.empty_like(marked.wide)
        quotients = np.empty(changed + n // 255 + _SLACK, np.uint8)
        low = np.empty(_CLASS_HEAD + changed * _MOST_LOW // 8 + _SLACK, np.uint8)
        quotients_size, low_size = _native.refit_to_classes(
            self._isa,
            _kind(element),
            *element.exponent,
            base,
            marked.where,
            marked.values,
            marked.wide,
            changed,
            values,
            wide,
            quotients,
            low,
        )
        return Classed(changed, quotients[:quotients_size], values[: (changed + 1) // 2], wide, low[:low_size])

    def from_classes(self, element: Element, base: Bytes, classed: Classed) -> Marked | None:
        n, changed = base.size * 8 // element.bits, classed.changed
        if classed.values.size != (changed + 1) // 2 or classed.wide.size % element.size:
            return None
        where, values = np.empty(changed + n // 255 + _SLACK, np.uint8), np.empty(changed + _SLACK, np.uint8)
        wide = np.empty_like(classed.wide)
        size = _native.refit_from_classes(
            self._isa,
            _kind(element),
            *element.exponent,
            base,
            classed.quotients,
            classed.values,
            classed.wide,
            classed.low,
            changed,
            where,
            values,
            wide,
        )
        return None if size < 0 else Marked(changed, where[:size], values[: (changed + 1) // 2], wide)

    def _check(self, element: Element, marked: Marked, elements: int, *, mask: bool) -> bool:
        if marked.values.size != (marked.changed + 1) // 2 or marked.wide.size % element.size:
            return False
        return bool(
            _native.refit_check(
                self._isa, _kind(element), mask, marked.where, marked.values, marked.wide, marked.changed, elements
            )
        )

    def _apply(self, element: Element, data: Bytes, marked: Marked, old: Bytes | None, *, mask: bool) -> Bytes:
        if old is None:
            old = np.empty(marked.changed * element.size, np.uint8)
        _native.refit_apply(
            self._isa, _kind(element), mask, data, marked.where, marked.values, marked.wide, marked.changed, old
        )
        return old

    def _patch(self, element: Element, data: Bytes, marked: Marked, *, mask: bool) -> Units:
        units = _units(marked.changed, element.unsigned)
        _native.refit_patch(
            self._isa,
            _kind(element),
            mask,
            data,
            marked.where,
            marked.values,
            marked.wide,
            marked.changed,
            units.positions,
            units.old,
            units.new,
        )
        return units


def _units(count: int, kind: np.dtype[np.unsignedinteger]) -> Units:
    return Units(np.empty(count, np.uint32), np.empty(count, kind), np.empty(count, kind))
