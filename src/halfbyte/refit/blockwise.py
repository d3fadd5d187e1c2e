"""One tensor of a target through its deltas, block by block and beside the weights: patches without a copy of the tensor.

A block is copied into a buffer that stays in the processor's cache, taken through all deltas that change it, and leaves as a
patch. Threads may work on different blocks at once. Nothing is written to the target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec import BlockKind, TensorDelta, block_hash, kernels
from halfbyte.refit.codec.apply import apply_block
from halfbyte.refit.codec.delta import BlockRow
from halfbyte.refit.codec.element import element_of
from halfbyte.refit.codec.kernels import Classed, Marked, Room, Units
from halfbyte.refit.codec.prepare import Body, check_fits, decode_block, misfit
from halfbyte.refit.codec.streams import Unpacker
from halfbyte.refit.patch import DENSE, BlockPatch, patch_between

__all__ = ["PART", "TensorFold"]

#: Blocks of a part: enough work for a thread to be worth a switch, little enough to share a large tensor.
PART = 16


class TensorFold:
    """The deltas of one tensor, folded in parts of :data:`PART` blocks.

    Arguments:
        dtype: of the tensor and all deltas.
        read: gives the bytes to start from; asked once, and what it gave is let go after the last part.
        deltas: in order, one at least; all of this dtype and of one length and block size.
        where: for messages.

    Attributes:
        parts: how many; each is to be worked on once.
        damaged: a block fitted none of its deltas. The patches are of no use then.
    """

    def __init__(self, dtype: str, read: Callable[[], Bytes], deltas: Sequence[TensorDelta], where: str) -> None:
        self.element, self.read, self.deltas, self.where = element_of(dtype), read, deltas, where
        self.damaged = False
        self._rows = [delta.rows() for delta in deltas]
        kinds = [delta.table["kind"] for delta in deltas]
        self._touched = np.flatnonzero(np.logical_or.reduce(kinds)).tolist()
        self.parts = max(1, -(-len(self._touched) // PART))
        self._held: Bytes | None = None
        self._left, self._lock = self.parts, threading.Lock()
        self._found: dict[int, BlockPatch] = {}

    def part(self, number: int) -> bool:
        """Fold some blocks; whether all others are done as well.

        Raises:
            RefitError: a damaged stream, deltas of another tensor, or one that gives other weights than it promised.
        """
        with self._lock:
            if self._held is None:
                self._held = self.read()
                check_fits(self.element.dtype, self._held, self.deltas[0], self.where)
            held = self._held
        room, unpacker = Room(), Unpacker()
        for index in self._touched[number * PART : (number + 1) * PART]:
            patch = self._block(held, index, room, unpacker)
            if patch is not None:
                self._found[index] = patch
        with self._lock:
            self._left -= 1
            if not self._left:
                self._held = None
            return not self._left

    def patches(self) -> tuple[BlockPatch, ...]:
        """What changes, after the last part; blocks in order."""
        return tuple(patch for _, patch in sorted(self._found.items()))

    def _block(self, held: Bytes, index: int, room: Room, unpacker: Unpacker) -> BlockPatch | None:
        begin, end = self.deltas[0].span(index)
        before = held[begin:end]
        now = room.take("block", before.size)
        copied, written, units = False, 0, None
        state = block_hash(before)
        for delta, rows in zip(self.deltas, self._rows, strict=True):
            row = rows[index]
            if row.kind is BlockKind.NOOP:
                continue
            body = decode_block(delta, row, index, self.element, unpacker, kernels(), self.where)
            if state != row.base:
                self.damaged = self.damaged or state != row.target
                continue
            if not copied:
                now[:] = before
                copied = True
            units = self._write(now, index, row, body)
            written += 1
            state = block_hash(now)
            if state != row.target:
                raise RefitError(
                    "a delta that passed every check gave other weights than it promised",
                    where=f"{self.where}, block {index}",
                    fix="publish the version again; if this repeats, test the memory",
                )
        if not written:
            return None
        if written > 1 or units is None:
            return patch_between(before, now, self.element.size, begin)
        return BlockPatch(begin, units.positions, units.old, units.new)

    def _write(self, now: Bytes, index: int, row: BlockRow, body: Body) -> Units | None:
        """Take a block through one delta; the units written where the streams tell them, and they are few."""
        use = kernels()
        if isinstance(body, Classed):
            body = use.from_classes(self.element, now, body)
            if body is None:
                raise misfit(self.where, index)
        assert body is not None
        if isinstance(body, Marked) and self.element.bits >= 8 and row.changed * self.element.size <= DENSE * now.size:
            write = use.patch_sparse if row.kind is BlockKind.SPARSE else use.patch_bitmask
            return write(self.element, now, body)
        apply_block(self.element, now, index, row.kind, body, use)
        return None
