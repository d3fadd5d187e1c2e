"""Class order in numpy: gaps counted within classes of the base's exponent."""

from __future__ import annotations

import struct

import numpy as np

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import Element
from halfbyte.refit.codec.integers import (
    ESCAPE,
    SKIP,
    constants,
    elements_of,
    gaps_of_positions,
    join_codes,
    positions_of_gaps,
    split_codes,
)
from halfbyte.refit.codec.kernels import Classed, Marked

__all__ = ["from_classes", "low_bits", "to_classes", "values_agree"]

_RECORD = struct.Struct("<BBI")  # class, low bits, changes
_MOST_LOW = 20


def low_bits(members: int, changed: int) -> int:
    """k of a class: the largest with 2**k * 2.375 <= the mean gap, in integers. (Quotients then take two or three bits,
    which Huffman codes write well, whatever the class.)"""
    k = 0
    while k < _MOST_LOW and 19 * changed * (2 << k) <= 8 * (members - changed):
        k += 1
    return k


def to_classes(element: Element, base: Bytes, marked: Marked) -> Classed:
    """``CodecKernels.to_classes``."""
    classes = _classes(element, base)
    positions, codes = positions_of_gaps(marked.where), split_codes(marked.values)[: marked.changed]
    wide = np.zeros(marked.changed, element.unsigned)
    wide[codes == ESCAPE] = marked.wide.view(element.unsigned)
    records, quotients, low, order = [], [], [], []
    for number in sorted(set(classes[positions].tolist()), reverse=True):
        members = np.flatnonzero(classes == number)
        mine = np.flatnonzero(classes[positions] == number)
        ranks = np.searchsorted(members, positions[mine])
        k = low_bits(members.size, mine.size)
        gaps = np.diff(ranks, prepend=-1) - 1
        records.append(_RECORD.pack(number, k, mine.size))
        quotients.append(gaps_of_positions(np.cumsum((gaps >> k) + 1) - 1))
        low.append((gaps[:, None] >> np.arange(k) & 1).astype(np.uint8).reshape(-1))
        order.append(mine)
    taken = np.concatenate(order)
    escaped = np.ascontiguousarray(wide[taken][codes[taken] == ESCAPE]).view(np.uint8)
    bits = np.packbits(np.concatenate(low), bitorder="little")
    head = np.frombuffer(struct.pack("<H", len(records)) + b"".join(records), np.uint8)
    return Classed(
        marked.changed, np.concatenate(quotients), join_codes(codes[taken]), escaped, np.concatenate([head, bits])
    )


def from_classes(element: Element, base: Bytes, classed: Classed) -> Marked | None:
    """``CodecKernels.from_classes``."""
    parts = _records(classed)
    if parts is None or not values_agree(element, classed):
        return None
    bits = np.unpackbits(classed.low[2 + _RECORD.size * len(parts) :], bitorder="little")
    if bits.size - 8 >= sum(k * changed for _, k, changed in parts) or bits[sum(k * c for _, k, c in parts) :].any():
        return None
    classes = _classes(element, base)
    ends = np.flatnonzero(classed.quotients != SKIP) + 1
    if ends.size != classed.changed or (ends[-1] if ends.size else 0) != classed.quotients.size:
        return None
    positions, mark, quotient, bit = [], 0, 0, 0
    for number, k, changed in parts:
        members = np.flatnonzero(classes == number)
        end = int(ends[mark + changed - 1])
        q = np.diff(positions_of_gaps(classed.quotients[quotient:end]), prepend=-1) - 1
        low = bits[bit : bit + k * changed].reshape(changed, k) @ (1 << np.arange(k, dtype=np.int64))
        ranks = np.cumsum((q << k) + low + 1) - 1
        if ranks[-1] >= members.size:
            return None
        positions.append(members[ranks])
        mark, quotient, bit = mark + changed, end, bit + k * changed
    found = np.concatenate(positions) if positions else np.zeros(0, np.int64)
    order = np.argsort(found, kind="stable")
    codes = split_codes(classed.values)[: classed.changed]
    wide = np.zeros(classed.changed, element.unsigned)
    wide[codes == ESCAPE] = classed.wide.view(element.unsigned)
    codes, wide = codes[order], wide[order]
    escaped = np.ascontiguousarray(wide[codes == ESCAPE]).view(np.uint8)
    return Marked(classed.changed, gaps_of_positions(found[order]), join_codes(codes), escaped)


def values_agree(element: Element, marked: Marked | Classed) -> bool:
    """The codes, their number and the wide values fit each other and the element."""
    codes = split_codes(marked.values)
    if marked.values.size != (marked.changed + 1) // 2:
        return False
    lengths = codes.size == marked.changed + marked.changed % 2 and marked.wide.size % element.size == 0
    if not lengths or codes[marked.changed :].any():
        return False
    escapes = int((codes[: marked.changed] == ESCAPE).sum())
    wide = marked.wide.view(element.unsigned)
    return escapes == wide.size and bool((wide > ESCAPE).all()) and bool((wide <= constants(element)[1]).all())


def _classes(element: Element, base: Bytes) -> Bytes:
    shift, width = element.exponent
    elements = elements_of(element, base)
    kind = element.unsigned.type
    classes: Bytes = (elements >> kind(shift) & kind((1 << width) - 1)).astype(np.uint8)
    return classes


def _records(classed: Classed) -> list[tuple[int, int, int]] | None:
    """(class, low bits, changes) of each class; None where they do not fit the streams."""
    low = classed.low.tobytes()
    if len(low) < 2:
        return None
    (count,) = struct.unpack_from("<H", low)
    head = 2 + count * _RECORD.size
    if count > 256 or len(low) < head:
        return None
    parts = list(_RECORD.iter_unpack(low[2:head]))
    numbers = [number for number, _, _ in parts]
    good = numbers == sorted(set(numbers), reverse=True) and all(k <= _MOST_LOW and changed for _, k, changed in parts)
    bits = sum(k * changed for _, k, changed in parts)
    if not good or sum(changed for *_, changed in parts) != classed.changed or len(low) != head + (bits + 7) // 8:
        return None
    return parts
