"""Encoding: for each block the shortest of the kinds worth trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.arena import Arena
from halfbyte.refit.codec.blocks import BLOCK, Hashes, block_count, block_hash, check_block, check_flat, element_count
from halfbyte.refit.codec.delta import ROW, STREAMS, BlockKind, Coding, TensorDelta
from halfbyte.refit.codec.element import Element, element_of
from halfbyte.refit.codec.kernels import CodecKernels, Marked, Room
from halfbyte.refit.codec.registry import kernels
from halfbyte.refit.codec.streams import Packer

__all__ = ["Profile", "encode"]

#: ``fast``: plain gaps. ``max``: gaps within exponent classes, fewer bytes and several times the time.
Profile = Literal["fast", "max"]

_SPARSE_MOST = {"fast": 4, "max": 1}  # sparse up to one change in so many,
_SPARSE_ONLY = 16  # and nothing else is tried below one in 16;
_DENSE_LEAST = 4  # XOR and raw from one in 4
_PAYLOAD = 32  # room for a payload of so much less than the weights, until it grows
_NONE = (0,) * STREAMS


@dataclass(frozen=True)
class _Candidate:
    """A block written in one kind."""

    kind: BlockKind
    coding: Coding
    streams: tuple[tuple[int, bool, bytes], ...]  # raw size, is it zstd, stored bytes

    @property
    def size(self) -> int:
        return sum(len(stored) for _, _, stored in self.streams)


def encode(
    dtype: str,
    base: Bytes,
    target: Bytes,
    profile: Profile = "fast",
    *,
    block: int = BLOCK,
    base_hashes: Hashes | None = None,
    with_kernels: CodecKernels | None = None,
) -> TensorDelta:
    """The change from ``base`` to ``target``, two flattened tensors (``arrays.flat_bytes``) of the same dtype and length.

    Bits are compared, never floats. The same input gives the same delta on every machine with the same zstd library.

    Arguments:
        dtype: safetensors name; ``F4`` for packed 4-bit codes, whatever dtype holds the bytes.
        base, target: uint8 [n_bytes].
        block: elements of a block, a power of two; both sides' state hashes must use the same.
        base_hashes: hashes of the base's blocks where they are known (``block_hashes``); saves a pass over the base.
        with_kernels: instead of the active ones.
    Raises:
        RefitError: lengths that differ or are no whole number of elements; arrays, blocks or a profile that do not exist.
    """
    check_flat(base, target)
    check_block(block)
    if profile not in _SPARSE_MOST:
        raise RefitError(f"profile {profile!r}", expected=" or ".join(_SPARSE_MOST))
    if base.size != target.size:
        raise RefitError(
            f"base has {base.size} bytes, target {target.size}", fix="write a tensor whose shape changed whole"
        )
    element, elements, use = element_of(dtype), element_count(dtype, base.size), with_kernels or kernels()
    blocks = block_count(elements, block)
    if base_hashes is not None and base_hashes.shape != (blocks,):
        raise RefitError(f"{base_hashes.size} block hashes for {blocks} blocks")
    known = None if base_hashes is None else base_hashes.tolist()
    packer, room, step = Packer(), Room(), element.bytes_of(block)
    payload = Arena(base.size // _PAYLOAD)
    rows = []
    for index in range(blocks):
        old, new = base[index * step : (index + 1) * step], target[index * step : (index + 1) * step]
        changed, best, after = _encode_block(element, old, new, profile, packer, room, use)
        before = block_hash(old) if known is None else known[index]
        if best is None:
            rows.append((BlockKind.NOOP, 0, 0, 0, 0, _NONE, _NONE, before, before))
            continue
        raw = (*(size for size, _, _ in best.streams), *_NONE)[:STREAMS]
        stored = (*(len(data) for _, _, data in best.streams), *_NONE)[:STREAMS]
        zstd = sum(is_zstd << s for s, (_, is_zstd, _) in enumerate(best.streams))
        rows.append((best.kind, best.coding, zstd, 0, changed, raw, stored, before, after))
        for _, _, data in best.streams:
            payload.put(data)
    return TensorDelta(dtype, elements, block, np.array(rows, ROW), payload.content)


def _encode_block(
    element: Element, base: Bytes, target: Bytes, profile: Profile, packer: Packer, room: Room, use: CodecKernels
) -> tuple[int, _Candidate | None, int]:
    """(changed elements, the shortest candidate, the target's hash); no candidate and no hash for a block that stays."""
    elements = base.size * 8 // element.bits
    marked = use.sparse(element, base, target, elements // _SPARSE_MOST[profile], room)
    if marked is not None and not marked.changed:
        return 0, None, 0
    masked = None
    if marked is None or marked.changed * _SPARSE_ONLY > elements:
        masked = use.bitmask(element, base, target, room)
    best: _Candidate | None = None
    changed = marked.changed if marked is not None else masked.changed if masked is not None else 0
    for kind, coding, raw in _candidates(element, base, target, profile, use, marked, masked, changed):
        streams = tuple((stream.size, *packer.pack(stream)) for stream in raw)
        assert len(streams) <= STREAMS
        candidate = _Candidate(kind, coding, streams)
        if best is None or candidate.size < best.size:
            best = candidate
    known = marked.target if marked is not None else None
    return changed, best, block_hash(target) if known is None else known


def _candidates(
    element: Element,
    base: Bytes,
    target: Bytes,
    profile: Profile,
    use: CodecKernels,
    marked: Marked | None,
    masked: Marked | None,
    changed: int,
) -> Iterator[tuple[BlockKind, Coding, tuple[Bytes, ...]]]:
    """(kind, coding, streams) worth compressing, in the order in which ties are decided."""
    elements = base.size * 8 // element.bits
    if use.is_fill(element, target):
        one: Bytes = target[: element.size] if element.bits >= 8 else target[:1] & np.uint8(15)
        yield BlockKind.FILL, Coding.PLAIN, (one,)
        return
    if marked is not None:
        yield BlockKind.SPARSE, Coding.PLAIN, (marked.where, marked.values, marked.wide)
        if profile == "max":
            classed = use.to_classes(element, base, marked)
            yield BlockKind.SPARSE, Coding.CLASSES, (classed.quotients, classed.values, classed.wide, classed.low)
    if masked is not None:
        yield BlockKind.BITMASK, Coding.PLAIN, (masked.where, masked.values, masked.wide)
    if changed * _DENSE_LEAST > elements:
        yield BlockKind.XOR, Coding.PLAIN, (use.xor(element, base, target),)
        yield BlockKind.RAW, Coding.PLAIN, (target,)
