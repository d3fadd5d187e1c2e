"""The native implementation of the codec's kernels: addresses and room for ``halfbyte.kernels._native`` (``cpp/refit.cpp``).

Importing this module raises ImportError where the extension was not built.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.kernels import _native
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import Element
from halfbyte.refit.codec.kernels import Classed, Marked

__all__ = ["NativeCodec", "instruction_sets"]

_ISAS = ("generic", "avx2", "avx512")
_SLACK = 64  # kRefitSlack
_CLASS_HEAD = 2 + 6 * 256  # bytes: the classes' records
_MOST_LOW = 20  # bits


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets this processor can run, slowest first."""
    return _ISAS[: _native.best_isa() + 1]


def _at(array: Bytes) -> int:
    """Address of a contiguous array."""
    assert array.flags.c_contiguous
    return array.ctypes.data


def _room(size: int) -> Bytes:
    return np.empty(size + _SLACK, np.uint8)


def _kind(element: Element) -> int:
    return -element.bits if element.signed_magnitude else element.bits


def _count(element: Element, data: npt.NDArray[np.uint8]) -> int:
    return data.size * 8 // element.bits


class NativeCodec:
    """``CodecKernels`` in C++ for one instruction set; the docstrings are the protocol's."""

    def __init__(self, isa: str) -> None:
        self._name = isa
        self._isa = _ISAS.index(isa)

    @property
    def name(self) -> str:
        return self._name

    def sparse(self, element: Element, base: Bytes, target: Bytes, most: int) -> Marked | None:
        n = _count(element, base)
        most = min(most, n)
        where, values, wide = _room(most + n // 255), _room(most), _room(most * element.size)
        size, changed, escapes = _native.refit_sparse(
            self._isa, _kind(element), _at(base), _at(target), n, most, _at(where), _at(values), _at(wide)
        )
        return None if changed < 0 else _marked(element, changed, escapes, where[:size], values, wide)

    def bitmask(self, element: Element, base: Bytes, target: Bytes) -> Marked:
        n = _count(element, base)
        where, values, wide = _room(n // 8 + 1), _room(n), _room(n * element.size)
        size, changed, escapes = _native.refit_bitmask(
            self._isa, _kind(element), _at(base), _at(target), n, _at(where), _at(values), _at(wide)
        )
        return _marked(element, changed, escapes, where[:size], values, wide)

    def is_fill(self, element: Element, target: Bytes) -> bool:
        return bool(_native.refit_is_fill(self._isa, _kind(element), _at(target), _count(element, target)))

    def xor(self, element: Element, base: Bytes, target: Bytes) -> Bytes:
        planes = np.empty_like(base)
        size = element.size
        _native.refit_xor(self._isa, size, _at(base), _at(target), base.size // size, _at(planes))
        return planes

    def check_sparse(self, element: Element, marked: Marked, elements: int) -> bool:
        return self._check(element, marked, elements, mask=False)

    def check_bitmask(self, element: Element, marked: Marked, elements: int) -> bool:
        return self._check(element, marked, elements, mask=True)

    def apply_sparse(self, element: Element, data: Bytes, marked: Marked) -> Bytes:
        return self._apply(element, data, marked, mask=False)

    def apply_bitmask(self, element: Element, data: Bytes, marked: Marked) -> Bytes:
        return self._apply(element, data, marked, mask=True)

    def apply_xor(self, element: Element, data: Bytes, planes: Bytes) -> None:
        _native.refit_apply_xor(self._isa, element.size, _at(data), _at(planes), data.size // element.size)

    def revert_sparse(self, element: Element, data: Bytes, gaps: Bytes, old: Bytes) -> None:
        changed = old.size // element.size
        _native.refit_revert(self._isa, _kind(element), False, _at(data), _at(gaps), gaps.size, changed, _at(old))

    def revert_bitmask(self, element: Element, data: Bytes, mask: Bytes, old: Bytes) -> None:
        changed = old.size // element.size
        _native.refit_revert(self._isa, _kind(element), True, _at(data), _at(mask), mask.size, changed, _at(old))

    def to_classes(self, element: Element, base: Bytes, marked: Marked) -> Classed:
        n, changed = _count(element, base), marked.changed
        values, wide = _room(changed), np.empty_like(marked.wide)
        quotients, low = _room(changed + n // 255), _room(_CLASS_HEAD + changed * _MOST_LOW // 8)
        quotients_size, low_size = _native.refit_to_classes(
            self._isa,
            _kind(element),
            *element.exponent,
            _at(base),
            n,
            _at(marked.where),
            _at(marked.values),
            _at(marked.wide),
            changed,
            _at(values),
            _at(wide),
            _at(quotients),
            _at(low),
        )
        return Classed(changed, quotients[:quotients_size], values[: (changed + 1) // 2], wide, low[:low_size])

    def from_classes(self, element: Element, base: Bytes, classed: Classed) -> Marked | None:
        n, changed = _count(element, base), classed.changed
        if classed.values.size != (changed + 1) // 2 or classed.wide.size % element.size:
            return None
        where, values, wide = _room(changed + n // 255), _room(changed), _room(classed.wide.size)
        size = _native.refit_from_classes(
            self._isa,
            _kind(element),
            *element.exponent,
            _at(base),
            n,
            _at(classed.values),
            _at(classed.wide),
            changed,
            classed.wide.size // element.size,
            _at(classed.quotients),
            classed.quotients.size,
            _at(classed.low),
            classed.low.size,
            _at(where),
            _at(values),
            _at(wide),
        )
        if size < 0:
            return None
        return Marked(changed, where[:size], values[: (changed + 1) // 2], wide[: classed.wide.size])

    def _check(self, element: Element, marked: Marked, elements: int, *, mask: bool) -> bool:
        if marked.values.size != (marked.changed + 1) // 2 or marked.wide.size % element.size:
            return False
        return bool(
            _native.refit_check(
                self._isa,
                _kind(element),
                mask,
                _at(marked.where),
                marked.where.size,
                _at(marked.values),
                _at(marked.wide),
                marked.changed,
                marked.wide.size // element.size,
                elements,
            )
        )

    def _apply(self, element: Element, data: Bytes, marked: Marked, *, mask: bool) -> Bytes:
        old = np.empty(marked.changed * element.size, np.uint8)
        _native.refit_apply(
            self._isa,
            _kind(element),
            mask,
            _at(data),
            _at(marked.where),
            marked.where.size,
            _at(marked.values),
            _at(marked.wide),
            marked.changed,
            marked.wide.size // element.size,
            _at(old),
        )
        return old


def _marked(element: Element, changed: int, escapes: int, where: Bytes, values: Bytes, wide: Bytes) -> Marked:
    return Marked(changed, where, values[: (changed + 1) // 2], wide[: escapes * element.size])
