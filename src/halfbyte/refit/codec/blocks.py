"""Blocks: where they lie in a tensor, and their hashes; what every call of the codec asks of its arguments."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes
from halfbyte.refit.codec.element import element_of

__all__ = [
    "BLOCK",
    "LOG2_BLOCK",
    "Hashes",
    "block_count",
    "block_hash",
    "block_hashes",
    "block_span",
    "check_block",
    "check_flat",
    "element_count",
]

#: Elements of a block of the flattened tensor.
BLOCK = 1 << 20
#: Base-2 logarithms of the block sizes that the format has.
LOG2_BLOCK = range(1, 21)
#: uint64 [blocks]: xxh3-64 of each block's bytes.
Hashes = npt.NDArray[np.uint64]


def check_block(block: int) -> None:
    """Raises:
    RefitError: the format has no blocks of that size.
    """
    if block < 1 or block.bit_length() - 1 not in LOG2_BLOCK or block & (block - 1):
        raise RefitError(f"blocks of {block} elements", expected=f"a power of two, 2 to {1 << LOG2_BLOCK[-1]}")


def check_flat(*arrays: Bytes) -> None:
    """Raises:
    RefitError: something else than contiguous uint8 [n].
    """
    for array in arrays:
        found = array if isinstance(array, np.ndarray) else None
        if found is None or found.dtype != np.uint8 or found.ndim != 1 or not found.flags.c_contiguous:
            shown = type(array).__name__ if found is None else f"{found.dtype} {list(found.shape)}"
            raise RefitError(
                f"{shown} in place of a tensor's bytes",
                expected="contiguous uint8 [n_bytes]",
                fix="use arrays.flat_bytes or arrays.writable_bytes",
            )


def element_count(dtype: str, n_bytes: int) -> int:
    """Elements in that many bytes.

    Raises:
        RefitError: not a whole number of them.
    """
    bits = element_of(dtype).bits
    if n_bytes * 8 % bits:
        raise RefitError(f"{n_bytes} bytes are no whole number of {dtype} elements", expected=f"{bits} bits each")
    return n_bytes * 8 // bits


def block_count(elements: int, block: int = BLOCK) -> int:
    """Blocks of a tensor of that many elements; an empty tensor has none."""
    return -(-elements // block)


def block_span(dtype: str, elements: int, index: int, block: int = BLOCK) -> tuple[int, int]:
    """Byte range [begin, end) of block ``index`` in the flattened tensor. Python integers: no size is too large."""
    element = element_of(dtype)
    return element.bytes_of(index * block), element.bytes_of(min(elements, (index + 1) * block))


def block_hash(data: Bytes) -> int:
    """xxh3-64 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def block_hashes(dtype: str, data: Bytes, block: int = BLOCK) -> Hashes:
    """Hash of every block of a flattened tensor."""
    elements = element_count(dtype, data.size)
    spans = (block_span(dtype, elements, index, block) for index in range(block_count(elements, block)))
    return np.array([block_hash(data[begin:end]) for begin, end in spans], np.uint64)
