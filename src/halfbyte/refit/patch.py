"""A patch: absolute new and old values at the changed places, ready to be written.

A delta is relative and compressed; before a target is paused it is decoded against the bytes the target holds and becomes a
patch. Writing a patch is a scatter and nothing else, so the pause is short. Both directions are idempotent: writing the new
values over a half-written block completes it, writing the old values takes it back, in any order and any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.codec import kernels
from halfbyte.refit.errors import WrongBaseError

__all__ = ["DENSE", "BlockPatch", "Change", "Side", "Stamp", "Update", "patch_between", "write_block"]

Side = Literal["old", "new"]

#: A block of which more than this share changes is kept whole: positions would only add to it.
DENSE = 0.4


@dataclass(frozen=True)
class Stamp:
    """Which weights something holds.

    Arguments:
        run: name of the training run.
        version: weight version; grows with every publication of a run.
        state: hex digest of all names, dtypes, shapes and bytes.
    """

    run: str
    version: int
    state: str


@dataclass(frozen=True, eq=False)
class BlockPatch:
    """The changed units of one stretch of a flattened tensor.

    A unit is one element, or one byte where elements are smaller (F4).

    Arguments:
        begin: byte at which the stretch begins.
        positions: unit numbers within the stretch, ascending, uint32[n]; None: all of it, in order.
        old, new: values there, unsigned integers of a unit's width, [n].
    """

    begin: int
    positions: npt.NDArray[np.uint32] | None
    old: npt.NDArray[np.unsignedinteger]
    new: npt.NDArray[np.unsignedinteger]

    @property
    def count(self) -> int:
        """Units that are written."""
        return len(self.new)

    @property
    def memory(self) -> int:
        """Bytes this patch occupies."""
        return self.old.nbytes + self.new.nbytes + (0 if self.positions is None else self.positions.nbytes)


@dataclass(frozen=True, eq=False)
class Change:
    """What happens to one tensor.

    Arguments:
        before: name, dtype and shape before; None: it is added.
        after: the same afterwards; None: it is removed.
        blocks: the changed stretches in order, where dtype and shape stay (``before == after``).
        old, new: all bytes, where the tensor is added, removed, or changes dtype or shape; else None.
    """

    before: TensorInfo | None
    after: TensorInfo | None
    blocks: tuple[BlockPatch, ...] = ()
    old: Bytes | None = None
    new: Bytes | None = None

    @property
    def name(self) -> str:
        """The tensor's name."""
        info = self.after or self.before
        assert info is not None
        return info.name

    @property
    def in_place(self) -> bool:
        """Dtype and shape stay; ``blocks`` say what changes."""
        return self.before is not None and self.before == self.after

    def positions(self) -> npt.NDArray[np.int64]:
        """All changed units of an in-place change, ascending, counted over the flattened tensor."""
        parts = []
        for block in self.blocks:
            start = block.begin // block.new.itemsize
            inside = np.arange(block.count) if block.positions is None else block.positions.astype(np.int64)
            parts.append(inside + start)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Update:
    """Everything that takes a target from one version to another, checked and decoded.

    Arguments:
        source: what the target holds now; None where it could not be named (it was compared block by block).
        target: what it will hold.
        changes: by name; tensors that stay are not listed.
    """

    source: Stamp | None
    target: Stamp
    changes: tuple[Change, ...]

    @property
    def changed(self) -> int:
        """Elements written: units of in-place changes, and whole tensors that are added or get another dtype or shape."""
        in_place = sum(block.count for change in self.changes for block in change.blocks)
        return in_place + sum(c.after.elements for c in self.changes if c.after is not None and not c.in_place)


def patch_between(before: Bytes, after: Bytes, unit: int, begin: int = 0) -> BlockPatch | None:
    """The patch that turns one stretch into the other, or None where they are equal.

    Arguments:
        before, after: uint8[n], n a multiple of ``unit``.
        unit: bytes of a unit: 1, 2, 4 or 8.
        begin: byte of the tensor at which the stretch begins.
    """
    found = kernels().differences(unit, before, after, int(DENSE * (before.size // unit)))
    if found is None:
        kind = np.dtype(f"<u{unit}")
        return BlockPatch(begin, None, before.view(kind).copy(), after.view(kind).copy())
    return BlockPatch(begin, found.positions, found.old, found.new) if len(found.positions) else None


def write_block(data: Bytes, block: BlockPatch, side: Side, *, expect: Sequence[Side] = ()) -> None:
    """Write one side of a patch into a flattened tensor.

    Arguments:
        data: the tensor's own bytes, writable uint8[n].
        side: which values.
        expect: sides that every unit may hold now; empty: anything (a torn block is completed).
    Raises:
        WrongBaseError: some unit holds neither; nothing was written.
    """
    unit = block.new.itemsize
    if block.positions is not None and len(expect) < 2:
        before = getattr(block, expect[0]) if expect else None
        wrong = kernels().put(data[block.begin :], block.positions, getattr(block, side), before)
        if wrong < 0:
            raise WrongBaseError("a patch reaches beyond the tensor's end", where=f"byte {block.begin} and following")
    else:
        length = block.count if block.positions is None else (data.size - block.begin) // unit
        view = data[block.begin : block.begin + length * unit].view(block.new.dtype)
        where = slice(None) if block.positions is None else block.positions
        held = view[where]
        differs = [held != getattr(block, name) for name in expect]
        wrong = int(np.logical_and.reduce(differs).sum()) if differs else 0
        if not wrong:
            view[where] = getattr(block, side)
    if wrong:
        raise WrongBaseError(
            f"{wrong} values changed under the refit after they were checked",
            where=f"byte {block.begin} and following",
            fix="let nothing else write to the weights; the next attempt starts from what they hold now",
        )
