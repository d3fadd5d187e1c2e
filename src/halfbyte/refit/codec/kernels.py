"""The kernels of the codec as one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import Element

__all__ = ["Classed", "CodecKernels", "Marked", "Room", "Units"]


@dataclass(frozen=True, eq=False)
class Marked:
    """Changed places of a block and their new values, as streams.

    ``where``: gaps (a byte below 255 skips that many elements and marks the next; 255 skips 255 and marks none) or, for
    bitmask blocks, one bit an element, lowest first. ``values``: 4 bits a change, the first in the low half: zigzag of the
    rank's difference minus one, or 15 where ``wide`` has the zigzag itself in the element's width. ``target``: hash of the
    block with the new values, where a kernel took it on the way.
    """

    changed: int
    where: Bytes
    values: Bytes
    wide: Bytes
    target: int | None = None


@dataclass(frozen=True, eq=False)
class Classed:
    """Marks in class order: classes of the base's exponent from the highest down, within a class by position.

    A gap counts elements of its own class. ``quotients``: gap >> k, written like gaps (255 skips 255 and marks none).
    ``low``: the number of classes (2 bytes), for each its number, its k (a byte each) and its changes (4 bytes), then the
    low k bits of every gap, lowest bit first. ``values`` and ``wide`` are as in ``Marked``, in class order.
    """

    changed: int
    quotients: Bytes
    values: Bytes
    wide: Bytes
    low: Bytes


@dataclass(frozen=True, eq=False)
class Units:
    """Changed units (elements of whole bytes) with both values: ``positions`` uint32 [n], ascending; ``old`` and ``new``
    unsigned integers of a unit's width, [n]."""

    positions: npt.NDArray[np.uint32]
    old: npt.NDArray[np.unsignedinteger]
    new: npt.NDArray[np.unsignedinteger]


class Room:
    """Memory that is used again from block to block; for one thread at a time."""

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def take(self, name: str, size: int) -> Bytes:
        """uint8 [size], whatever it holds; valid until the name is taken again."""
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, np.uint8)
        return held[:size]


class CodecKernels(Protocol):
    """Work on one block. All arrays are uint8, contiguous; ``base``, ``target`` and ``data`` hold the same whole elements.

    Streams made in a ``room`` are views of it, valid until the next block is worked on in it.

    Streams given to ``apply_*`` and ``revert_*`` must have passed ``check_*``: they are trusted, so that a write starts
    only after everything was checked.
    """

    @property
    def name(self) -> str:
        """``reference`` or an instruction set."""
        ...

    def sparse(
        self, element: Element, base: Bytes, target: Bytes, most: int, room: Room | None = None
    ) -> Marked | None:
        """Changed places as gaps; None as soon as more than ``most`` are found."""
        ...

    def bitmask(self, element: Element, base: Bytes, target: Bytes, room: Room | None = None) -> Marked:
        """Changed places as a mask."""
        ...

    def is_fill(self, element: Element, target: Bytes) -> bool:
        """All elements are equal (one element at least)."""
        ...

    def xor(self, element: Element, base: Bytes, target: Bytes) -> Bytes:
        """base ^ target, byte 0 of every element first, then byte 1, and so on."""
        ...

    def check_sparse(self, element: Element, marked: Marked, elements: int) -> bool:
        """Whether the streams agree with each other and stay within the block."""
        ...

    def check_bitmask(self, element: Element, marked: Marked, elements: int) -> bool:
        """Likewise for a mask."""
        ...

    def apply_sparse(self, element: Element, data: Bytes, marked: Marked, old: Bytes | None = None) -> Bytes:
        """Writes the new values; returns the old ones (``element.size`` bytes each), in ``old`` where it is given."""
        ...

    def apply_bitmask(self, element: Element, data: Bytes, marked: Marked, old: Bytes | None = None) -> Bytes:
        """Likewise for a mask."""
        ...

    def patch_sparse(self, element: Element, data: Bytes, marked: Marked) -> Units:
        """As ``apply_sparse``, for elements of whole bytes; returns what was written where, and the old values."""
        ...

    def patch_bitmask(self, element: Element, data: Bytes, marked: Marked) -> Units:
        """Likewise for a mask."""
        ...

    def differences(self, unit: int, before: Bytes, after: Bytes, most: int) -> Units | None:
        """Units of so many bytes that differ; None where there are more than ``most``. At most 2**32 units."""
        ...

    def put(
        self,
        data: Bytes,
        positions: npt.NDArray[np.uint32],
        values: npt.NDArray[np.unsignedinteger],
        expect: npt.NDArray[np.unsignedinteger] | None = None,
    ) -> int:
        """Write values into units of ``data``.

        Arguments:
            expect: values that must be there now.
        Returns:
            How many units hold something else than ``expect`` says, then nothing is written; 0 where all was written; -1
            where a position lies beyond the end, and nothing was written.
        """
        ...

    def apply_xor(self, element: Element, data: Bytes, planes: Bytes) -> None:
        """Undoes itself."""
        ...

    def revert_sparse(self, element: Element, data: Bytes, gaps: Bytes, old: Bytes) -> None:
        """Puts the old values back."""
        ...

    def revert_bitmask(self, element: Element, data: Bytes, mask: Bytes, old: Bytes) -> None:
        """Likewise for a mask."""
        ...

    def to_classes(self, element: Element, base: Bytes, marked: Marked) -> Classed:
        """The same changes in class order."""
        ...

    def from_classes(self, element: Element, base: Bytes, classed: Classed) -> Marked | None:
        """Back to position order; None where the streams do not fit each other or the base (checked, unlike ``apply_*``)."""
        ...
