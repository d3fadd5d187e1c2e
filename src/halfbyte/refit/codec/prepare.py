"""Preparing: everything that can be found wrong with a delta is found here, before a byte of the weights is written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.arena import Arena
from halfbyte.refit.codec.blocks import block_hash, check_flat, element_count
from halfbyte.refit.codec.delta import BlockKind, BlockRow, Coding, TensorDelta
from halfbyte.refit.codec.element import Element, element_of
from halfbyte.refit.codec.kernels import Classed, CodecKernels, Marked
from halfbyte.refit.codec.registry import kernels
from halfbyte.refit.codec.streams import Unpacker

__all__ = [
    "BlockState",
    "Body",
    "Prepared",
    "block_state",
    "check_fits",
    "decode",
    "decode_block",
    "misfit",
    "prepare",
]

_EMPTY = np.empty(0, np.uint8)

#: A block's decoded content: marks and values (in class order until the base is at hand), or bytes (XOR planes, raw bytes,
#: one element); None for a noop.
Body = Marked | Classed | Bytes | None


class BlockState(IntEnum):
    """What a block of the weights is, by its hash."""

    UNCHANGED = 0  # the delta leaves it alone (its hash is looked at in an audit only)
    READY = 1  # it is the base: apply
    DONE = 2  # it is the target already
    DAMAGED = 3  # neither: repair this block


@dataclass(frozen=True, eq=False)
class Prepared:
    """A delta that was decoded and checked against the weights it is for.

    ``states``: one a block. ``bodies``: what to write, None where nothing is to be written.
    """

    delta: TensorDelta
    states: tuple[BlockState, ...]
    bodies: tuple[Body, ...]

    def blocks(self, state: BlockState) -> tuple[int, ...]:
        """Numbers of the blocks in that state."""
        return tuple(index for index, found in enumerate(self.states) if found is state)

    @property
    def damaged(self) -> tuple[int, ...]:
        """Blocks that are neither base nor target."""
        return self.blocks(BlockState.DAMAGED)


def prepare(
    dtype: str,
    data: Bytes,
    delta: TensorDelta,
    *,
    audit: bool = False,
    where: str = "delta",
    with_kernels: CodecKernels | None = None,
) -> Prepared:
    """Decode a delta, check its streams and compare every block's hash. Reads ``data`` and writes nothing.

    Arguments:
        dtype, data: the tensor, uint8 [n_bytes].
        audit: also hash the blocks that the delta leaves alone.
        where: for messages: the object and tensor.
    Raises:
        RefitError: the delta is for another dtype or length, or its streams are damaged.
    """
    check_fits(dtype, data, delta, where)
    use = with_kernels or kernels()
    element, unpacker, step = element_of(dtype), Unpacker(), element_of(dtype).bytes_of(delta.block)
    states, bodies, arenas = [], [], _stream_arenas(delta)
    for index, row in enumerate(delta.rows()):
        block = data[index * step : (index + 1) * step]
        state = block_state(row, block, audit=audit)
        body = None
        if state is not BlockState.UNCHANGED:
            body = decode_block(delta, row, index, element, unpacker, use, where, arenas)
        if isinstance(body, Classed) and state is BlockState.READY:
            body = use.from_classes(element, block, body)
            if body is None:
                raise misfit(where, index)
        states.append(state)
        bodies.append(body if state is BlockState.READY else None)
    return Prepared(delta, tuple(states), tuple(bodies))


def decode(delta: TensorDelta, *, where: str = "delta", with_kernels: CodecKernels | None = None) -> tuple[Body, ...]:
    """Decompress all streams and check what can be checked without the weights they are for.

    Raises:
        RefitError: a damaged stream.
    """
    use, element, unpacker = with_kernels or kernels(), element_of(delta.dtype), Unpacker()
    arenas = _stream_arenas(delta)
    return tuple(
        decode_block(delta, row, index, element, unpacker, use, where, arenas) for index, row in enumerate(delta.rows())
    )


def _stream_arenas(delta: TensorDelta) -> tuple[Arena, Arena]:
    """Memory for all streams of a delta: for those that an undo keeps, and for the others."""
    sizes = delta.table["raw"].sum(0, dtype=np.int64)
    return Arena(int(sizes[0])), Arena(int(sizes[1:].sum()))


def check_fits(dtype: str, data: Bytes, delta: TensorDelta, where: str) -> None:
    """The delta is for a tensor of this dtype and length, and these are its bytes."""
    check_flat(data)
    if delta.dtype != dtype or delta.elements != element_count(dtype, data.size):
        raise RefitError(
            f"the delta is for {delta.elements} elements of {delta.dtype}",
            where=where,
            expected=f"{element_count(dtype, data.size)} elements of {dtype}",
        )


def block_state(row: BlockRow, block: Bytes, *, audit: bool = False) -> BlockState:
    """What a block of the weights is."""
    if row.kind is BlockKind.NOOP:
        good = not audit or block_hash(block) == row.base
        return BlockState.UNCHANGED if good else BlockState.DAMAGED
    found = block_hash(block)
    return BlockState.READY if found == row.base else BlockState.DONE if found == row.target else BlockState.DAMAGED


def decode_block(
    delta: TensorDelta,
    row: BlockRow,
    index: int,
    element: Element,
    unpacker: Unpacker,
    use: CodecKernels,
    where: str,
    arenas: tuple[Arena, Arena] | None = None,
) -> Body:
    """Decompress a block's streams, into ``arenas`` if given, and check what can be checked without the weights.

    Raises:
        RefitError: a damaged stream.
    """
    kind = row.kind
    if kind is BlockKind.NOOP:
        return None
    streams, at, zstd = [], row.offset, row.zstd
    for number, (raw, stored) in enumerate(zip(row.raw, row.stored, strict=True)):
        if raw == 0:
            streams.append(_EMPTY)
            zstd >>= 1
            continue
        arena = None if arenas is None else arenas[number > 0]
        try:
            streams.append(unpacker.unpack(delta.payload[at : at + stored], bool(zstd & 1), raw, arena))
        except RefitError as error:
            raise RefitError(error.what, where=f"{where}, block {index}", fix="fetch the object again") from error
        at, zstd = at + stored, zstd >> 1
    if kind is BlockKind.XOR or kind is BlockKind.RAW:
        return streams[0]
    elements = min(delta.block, delta.elements - index * delta.block)
    if kind is BlockKind.FILL:
        if element.bits < 8 and streams[0][0] > 15:
            raise misfit(where, index)
        return streams[0]
    if row.coding is Coding.CLASSES:
        return Classed(row.changed, *streams)
    marked = Marked(row.changed, streams[0], streams[1], streams[2])
    check = use.check_sparse if kind is BlockKind.SPARSE else use.check_bitmask
    if not check(element, marked, elements):
        raise misfit(where, index)
    return marked


def misfit(where: str, index: int) -> RefitError:
    """Streams that contradict each other or the base."""
    return RefitError(
        "unusable delta: positions or values that do not fit the block",
        where=f"{where}, block {index}",
        fix="fetch the object again",
    )
