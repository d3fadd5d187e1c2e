"""``TensorDelta``: the change of one tensor, as a table with a row for each block and the streams of all blocks.

``docs/refit-format.md`` has the bytes. ``from_bytes`` trusts nothing: sizes are checked before anything is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.blocks import LOG2_BLOCK, block_count, block_span
from halfbyte.refit.codec.element import ELEMENTS, element_of

__all__ = ["ROW", "STREAMS", "BlockKind", "BlockRow", "Coding", "TensorDelta"]


class BlockKind(IntEnum):
    """What a block's streams are."""

    NOOP = 0
    SPARSE = 1
    BITMASK = 2
    XOR = 3
    RAW = 4
    FILL = 5


class Coding(IntEnum):
    """How a sparse block writes its positions: gaps over all elements, or within classes of the base's exponent."""

    PLAIN = 0
    CLASSES = 1


#: Streams a block can have.
STREAMS = 4
#: One block: kind, coding, bit s of ``zstd`` set where stream s is a zstd frame, changed elements, bytes of each stream
#: before and after compression, hashes before and after.
ROW = np.dtype(
    [
        ("kind", "u1"),
        ("coding", "u1"),
        ("zstd", "u1"),
        ("zero", "u1"),
        ("changed", "<u4"),
        ("raw", "<u4", (STREAMS,)),
        ("stored", "<u4", (STREAMS,)),
        ("base", "<u8"),
        ("target", "<u8"),
    ]
)
_HEADER = struct.Struct("<4sBBBBQQQ")  # magic, version, dtype, log2 of the block, 0, elements, blocks, payload bytes
_MAGIC = b"HBTD"
_VERSION = 1
_FEW = 8  # rows
_CLASS_HEAD = 2 + 6 * 256  # bytes: number of classes and a record for each


class BlockRow(NamedTuple):
    """A row of the table, and where the block's first stream begins in the payload."""

    kind: BlockKind
    coding: Coding
    zstd: int
    changed: int
    raw: list[int]
    stored: list[int]
    base: int
    target: int
    offset: int


@dataclass(frozen=True, eq=False)
class TensorDelta:
    """The change of one flattened tensor of ``elements`` elements.

    ``table``: [blocks] of :data:`ROW`. ``payload``: uint8, the streams one after the other. Made by
    :func:`~halfbyte.refit.codec.encode` or :meth:`from_bytes`; both guarantee that the table describes the payload to
    the byte. What the streams themselves say is checked when they are decoded.
    """

    dtype: str
    elements: int
    block: int
    table: npt.NDArray[np.void]
    payload: Bytes

    @property
    def changed(self) -> int:
        """Elements that differ (bits compared)."""
        return int(self.table["changed"].sum(dtype=np.int64))

    @property
    def is_noop(self) -> bool:
        """No block changes."""
        return not self.table["kind"].any()

    @property
    def n_bytes(self) -> int:
        """Bytes of :meth:`to_bytes`."""
        return int(_HEADER.size + self.table.nbytes + self.payload.size)

    def rows(self) -> list[BlockRow]:
        """The table as Python numbers, much faster to walk than the array."""
        kind, coding, zstd, _, changed, raw, stored, base, target = (
            self.table[name].tolist() for name in ROW.names or ()
        )
        sizes = self.table["stored"].sum(1, dtype=np.int64)
        offsets = (np.cumsum(sizes) - sizes).tolist()
        columns = zip(kind, coding, zstd, changed, raw, stored, base, target, offsets, strict=True)
        return [BlockRow(BlockKind(kind), Coding(coding), *rest) for kind, coding, *rest in columns]

    def span(self, index: int) -> tuple[int, int]:
        """Byte range of a block in the tensor."""
        return block_span(self.dtype, self.elements, index, self.block)

    def to_bytes(self) -> bytes:
        """Header, table, payload."""
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            element_of(self.dtype).code,
            self.block.bit_length() - 1,
            0,
            self.elements,
            len(self.table),
            self.payload.size,
        )
        return b"".join((header, self.table.tobytes(), self.payload.data))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview | Bytes, *, where: str = "delta") -> TensorDelta:
        """Read untrusted bytes; the payload stays a view of them.

        Raises:
            RefitError: anything that the format page does not allow.
        """
        raw = np.frombuffer(np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data, np.uint8)
        if raw.size < _HEADER.size:
            raise _bad(where, f"{raw.size} bytes are too few")
        magic, version, code, log2, zero, elements, blocks, n_payload = _HEADER.unpack_from(raw.data)
        if magic != _MAGIC:
            raise _bad(where, "it does not start with HBTD")
        if version != _VERSION:
            raise _bad(
                where, f"format version {version}", expected=f"version {_VERSION}", fix="install a newer halfbyte"
            )
        dtype = next((name for name, element in ELEMENTS.items() if element.code == code), None)
        if dtype is None or zero or log2 not in LOG2_BLOCK:
            raise _bad(where, f"header with dtype {code}, block 2**{log2}, reserved {zero}")
        if elements >= 1 << 60 or elements * element_of(dtype).bits % 8 or blocks != block_count(elements, 1 << log2):
            raise _bad(where, f"{elements} elements in {blocks} blocks of 2**{log2}")
        if raw.size != _HEADER.size + blocks * ROW.itemsize + n_payload:
            raise _bad(
                where, f"{raw.size} bytes, the header describes {_HEADER.size + blocks * ROW.itemsize + n_payload}"
            )
        begin = _HEADER.size + blocks * ROW.itemsize
        table = raw[_HEADER.size : begin].view(ROW)
        delta = cls(dtype, elements, 1 << log2, table, raw[begin:])
        _check_table(delta, where)
        return delta


def _check_table(delta: TensorDelta, where: str) -> None:
    """Everything that holds of a table by itself."""
    (_check_rows if len(delta.table) <= _FEW else _check_columns)(delta, where)


def _check_rows(delta: TensorDelta, where: str) -> None:
    """The rules one row after the other: for tables of a few rows several times as fast as over columns."""
    element, left, total = element_of(delta.dtype), delta.elements, 0
    for number, row in enumerate(delta.table.tolist()):
        kind, coding, zstd, zero, changed, raw, stored, base, target = row
        size, left = min(delta.block, left), left - delta.block
        values = raw[1] == (changed + 1) // 2 and raw[2] % element.size == 0 and raw[2] <= changed * element.size
        gaps = changed <= raw[0] <= changed + size // 255
        alone = not any(raw[1:])
        classes = kind == BlockKind.SPARSE and coding == Coding.CLASSES
        if kind == BlockKind.SPARSE:
            fits = gaps and values and (raw[3] <= _CLASS_HEAD + 3 * changed if classes else raw[3] == 0)
        elif kind == BlockKind.BITMASK:
            fits = raw[0] == (size + 7) // 8 and values and raw[3] == 0
        else:
            lengths = {BlockKind.NOOP: 0, BlockKind.FILL: element.size}
            fits = alone and raw[0] == lengths.get(kind, size * element.bits // 8)
        packed = [
            (0 < s < r) if zstd >> bit & 1 else s == r for bit, (r, s) in enumerate(zip(raw, stored, strict=True))
        ]
        tests = {
            "unknown kind or coding": kind <= max(BlockKind) and (coding == 0 or classes),
            "reserved bits": zero == 0 and zstd < 1 << STREAMS,
            "changed elements": changed <= size and (changed > 0) == (kind != BlockKind.NOOP),
            "stream lengths": fits,
            "stored lengths": all(packed),
            "hashes": (base == target) == (kind == BlockKind.NOOP),
        }
        for what, good in tests.items():
            if not good:
                raise _bad(where, f"block {number}: {what}")
        total += sum(stored)
    if total != delta.payload.size:
        raise _bad(where, f"{delta.payload.size} bytes of streams, the table describes {total}")


def _check_columns(delta: TensorDelta, where: str) -> None:
    """The rules over all rows at once."""
    table, element = delta.table, element_of(delta.dtype)
    if not len(table):
        if delta.payload.size:
            raise _bad(where, "streams without blocks")
        return
    kind, coding, changed = table["kind"], table["coding"], table["changed"].astype(np.int64)
    raw, stored = table["raw"].astype(np.int64), table["stored"].astype(np.int64)
    zstd = (table["zstd"][:, None] >> np.arange(STREAMS) & 1).astype(bool)
    size = np.full(len(table), delta.block, np.int64)
    size[-1] = delta.elements - (len(table) - 1) * delta.block
    n_bytes = size * element.bits // 8
    # What the streams of each kind may measure before compression; position streams of gaps have a byte a change and one
    # for every 255 elements skipped.
    values = (raw[:, 1] == (changed + 1) // 2) & (raw[:, 2] % element.size == 0) & (raw[:, 2] <= changed * element.size)
    gaps = (raw[:, 0] >= changed) & (raw[:, 0] <= changed + size // 255)
    alone, last = (raw[:, 1:] == 0).all(1), raw[:, 3]
    classes = (kind == BlockKind.SPARSE) & (coding == Coding.CLASSES)
    fits = np.select(
        [kind == BlockKind.NOOP, classes, kind == BlockKind.SPARSE, kind == BlockKind.BITMASK, kind == BlockKind.FILL],
        [
            alone & (raw[:, 0] == 0),
            gaps & values & (last <= _CLASS_HEAD + 3 * changed),
            gaps & values & (last == 0),
            (raw[:, 0] == (size + 7) // 8) & values & (last == 0),
            alone & (raw[:, 0] == element.size),
        ],
        alone & (raw[:, 0] == n_bytes),
    )
    tests = {
        "unknown kind or coding": (kind <= max(BlockKind)) & ((coding == 0) | classes),
        "reserved bits": (table["zero"] == 0) & (table["zstd"] < 1 << STREAMS),
        "changed elements": (changed <= size) & ((changed > 0) == (kind != BlockKind.NOOP)),
        "stream lengths": fits,
        "stored lengths": (np.where(zstd, (stored < raw) & (stored > 0), stored == raw)).all(1),
        "hashes": (table["base"] == table["target"]) == (kind == BlockKind.NOOP),
    }
    for what, good in tests.items():
        if not good.all():
            raise _bad(where, f"block {int(np.flatnonzero(~good)[0])}: {what}")
    if int(stored.sum()) != delta.payload.size:
        raise _bad(where, f"{delta.payload.size} bytes of streams, the table describes {int(stored.sum())}")


def _bad(where: str, what: str, **more: Any) -> RefitError:
    return RefitError(f"unusable delta: {what}", where=where, **({"fix": "fetch it again"} | more))
