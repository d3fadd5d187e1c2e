"""Applying in place, and undoing it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.arena import roomy
from halfbyte.refit.codec.blocks import block_hash
from halfbyte.refit.codec.delta import BlockKind, Coding, TensorDelta
from halfbyte.refit.codec.element import Element, element_of
from halfbyte.refit.codec.kernels import Classed, CodecKernels, Marked
from halfbyte.refit.codec.prepare import BlockState, Body, Prepared, block_state, check_fits, decode, prepare
from halfbyte.refit.codec.registry import kernels

__all__ = ["Applied", "BlockUndo", "Undo", "apply", "apply_block", "commit", "revert"]


@dataclass(frozen=True, eq=False)
class BlockUndo:
    """What brings one block back: marks with the old values there, XOR planes, or all old bytes."""

    index: int
    kind: BlockKind
    where: Bytes
    old: Bytes


@dataclass(frozen=True, eq=False)
class Undo:
    """The way back to the version before; holds old values at the changed places only."""

    delta: TensorDelta
    blocks: tuple[BlockUndo, ...]

    @property
    def n_bytes(self) -> int:
        """Memory it takes."""
        return sum(block.where.size + block.old.size for block in self.blocks)


@dataclass(frozen=True, eq=False)
class Applied:
    """What was done: block numbers written, found done before, and damaged (not written: repair them)."""

    written: tuple[int, ...]
    already: tuple[int, ...]
    damaged: tuple[int, ...]
    undo: Undo


def commit(
    prepared: Prepared, data: Bytes, *, verify: bool = True, with_kernels: CodecKernels | None = None
) -> Applied:
    """Write what was prepared from these very bytes; nothing else may write to them in between.

    Arguments:
        data: writable uint8 [n_bytes].
        verify: hash every written block and compare it with the target.
    Raises:
        RefitError: read-only data, or a block did not become its target; then all blocks are as they were.
    """
    check_fits(prepared.delta.dtype, data, prepared.delta, "commit")
    return _write(prepared.delta, data, prepared.states, prepared.bodies, verify, with_kernels or kernels())


def apply(
    dtype: str,
    data: Bytes,
    delta: TensorDelta,
    *,
    verify: bool = True,
    where: str = "delta",
    with_kernels: CodecKernels | None = None,
) -> Applied:
    """:func:`prepare` and :func:`commit` in one pass over the weights.

    A block equal to its base is written, one equal to its target is left, any other is reported as damaged and left. So
    applying twice is applying once, and applying to a half-applied tensor completes it. All streams are decoded and
    checked before the first write.

    Raises:
        RefitError: as prepare and commit.
    """
    use = with_kernels or kernels()
    check_fits(dtype, data, delta, where)
    if (delta.table["coding"] == Coding.CLASSES).any():  # their checks need the base
        return commit(prepare(dtype, data, delta, where=where, with_kernels=use), data, verify=verify, with_kernels=use)
    return _write(delta, data, None, decode(delta, where=where, with_kernels=use), verify, use)


def revert(data: Bytes, undo: Undo, *, with_kernels: CodecKernels | None = None) -> None:
    """Bring back the bytes from before. ``data`` must be what the commit left, or a part of it written."""
    use, element = with_kernels or kernels(), element_of(undo.delta.dtype)
    check_fits(undo.delta.dtype, data, undo.delta, "undo")
    _check_writable(data)
    for block in undo.blocks:
        begin, end = undo.delta.span(block.index)
        _revert_block(element, data[begin:end], block, use)


def _write(
    delta: TensorDelta,
    data: Bytes,
    states: tuple[BlockState, ...] | None,
    bodies: tuple[Body, ...],
    verify: bool,
    use: CodecKernels,
) -> Applied:
    _check_writable(data)
    element = element_of(delta.dtype)
    step, done, seen = element.bytes_of(delta.block), [], []
    old, at = roomy(delta.changed * element.size), 0
    for index, (row, body) in enumerate(zip(delta.rows(), bodies, strict=True)):
        block = data[index * step : (index + 1) * step]
        state = block_state(row, block) if states is None else states[index]
        seen.append(state)
        if state is not BlockState.READY:
            continue
        assert body is not None
        assert not isinstance(body, Classed)
        end = at + row.changed * element.size
        done.append(apply_block(element, block, index, row.kind, body, use, old[at:end]))
        at = end
        if verify and block_hash(block) != row.target:
            revert(data, Undo(delta, tuple(done)), with_kernels=use)
            raise RefitError(
                "a delta that passed every check gave other weights than it promised; they are back to what they were",
                where=f"block {index}",
                fix="publish the version again; if this repeats, test the memory",
            )
    found = {state: tuple(i for i, s in enumerate(seen) if s is state) for state in BlockState}
    undo = Undo(delta, tuple(done))
    return Applied(found[BlockState.READY], found[BlockState.DONE], found[BlockState.DAMAGED], undo)


def apply_block(
    element: Element,
    block: Bytes,
    index: int,
    kind: BlockKind,
    body: Marked | Bytes,
    use: CodecKernels,
    old: Bytes | None = None,
) -> BlockUndo:
    """Write one block; the way back, with the old values of marked elements in ``old`` if given. Nothing is checked here."""
    if isinstance(body, Marked):
        write = use.apply_sparse if kind is BlockKind.SPARSE else use.apply_bitmask
        return BlockUndo(index, kind, body.where, write(element, block, body, old))
    if kind is BlockKind.XOR:
        use.apply_xor(element, block, body)
        return BlockUndo(index, kind, body, np.empty(0, np.uint8))
    before = block.copy()
    if kind is BlockKind.RAW:
        block[:] = body
    elif element.bits == 4:
        block[:] = body[0] | body[0] << 4
    else:
        block.view(element.unsigned)[:] = body.view(element.unsigned)[0]
    return BlockUndo(index, kind, np.empty(0, np.uint8), before)


def _revert_block(element: Element, block: Bytes, undo: BlockUndo, use: CodecKernels) -> None:
    if undo.kind is BlockKind.SPARSE:
        use.revert_sparse(element, block, undo.where, undo.old)
    elif undo.kind is BlockKind.BITMASK:
        use.revert_bitmask(element, block, undo.where, undo.old)
    elif undo.kind is BlockKind.XOR:
        use.apply_xor(element, block, undo.where)
    else:
        block[:] = undo.old


def _check_writable(data: Bytes) -> None:
    if not data.flags.writeable:
        raise RefitError("the weights are read-only", fix="give arrays.writable_bytes of them")
