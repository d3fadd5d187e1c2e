"""Delta codecs of other systems, written again from their layouts, to stand beside ours in ``halfbyte bench refit``.

Each takes a base and a target (uint16 [n], the bits of BF16 weights) and gives bytes; applying them to the base gives the
target. Compression is zstd level 1, as those systems use it. Where the real package is installed it takes part as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

__all__ = ["RIVALS", "Rival", "installed_rivals"]

Words = npt.NDArray[np.uint16]

_ESCAPE = 0xFFFF


@dataclass(frozen=True)
class Rival:
    """A codec.

    Arguments:
        name: as in the table.
        encode: (base, target) -> payload.
        apply: (data, payload) -> the target's words; ``data`` holds the base and may be changed in place.
        size: bytes of a payload.
    """

    name: str
    encode: Callable[[Words, Words], Any]
    apply: Callable[[Words, Any], Words]
    size: Callable[[Any], int] = len


def _compress(data: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def dense_xor(base: Words, target: Words) -> bytes:
    """The common interchange layout: XOR of everything, compressed."""
    return _compress(np.bitwise_xor(base, target).view(np.uint8).data)


def apply_dense_xor(data: Words, payload: bytes) -> Words:
    """Inverse of :func:`dense_xor`."""
    np.bitwise_xor(data, np.frombuffer(_decompress(payload), np.uint16), out=data)
    return data


def gap_xor(base: Words, target: Words) -> bytes:
    """Distances between changed positions as uint16 (0xFFFF: that many unchanged and none changed), and XOR values; both
    compressed as one stream."""
    difference = np.bitwise_xor(base, target)
    positions = np.flatnonzero(difference)
    gaps = np.diff(positions, prepend=-1) - 1
    skips, rest = np.divmod(gaps, _ESCAPE)
    stream = np.full(len(gaps) + int(skips.sum()), _ESCAPE, np.uint16)
    stream[np.cumsum(skips + 1) - 1] = rest.astype(np.uint16)
    count = np.array([len(positions), len(stream)], np.uint64).tobytes()
    return count + _compress(stream.tobytes() + difference[positions].tobytes())


def apply_gap_xor(data: Words, payload: bytes) -> Words:
    """Inverse of :func:`gap_xor`."""
    count, length = (int(n) for n in np.frombuffer(payload[:16], np.uint64))
    words = np.frombuffer(_decompress(payload[16:]), np.uint16)
    stream, values = words[:length], words[length:]
    steps = stream.astype(np.int64) + (stream != _ESCAPE)
    positions = np.cumsum(steps)[stream != _ESCAPE] - 1
    assert len(positions) == len(values) == count
    data[positions] ^= values
    return data


def index_value(base: Words, target: Words) -> bytes:
    """Position as int32 and the new value, not compressed."""
    positions = np.flatnonzero(base != target)
    return positions.astype(np.int32).tobytes() + target[positions].tobytes()


def apply_index_value(data: Words, payload: bytes) -> Words:
    """Inverse of :func:`index_value`."""
    count = len(payload) // 6
    data[np.frombuffer(payload, np.int32, count)] = np.frombuffer(payload, np.uint16, count, 4 * count)
    return data


RIVALS: tuple[Rival, ...] = (
    Rival("int32 + value", index_value, apply_index_value),
    Rival("dense XOR + zstd", dense_xor, apply_dense_xor),
    Rival("u16 gap + XOR + zstd", gap_xor, apply_gap_xor),
)


def installed_rivals() -> tuple[list[Rival], list[str]]:
    """Codecs of packages that are installed here, and a line for each that is not."""
    try:
        package = importlib.import_module("fireworks_delta_compression")
    except ImportError:
        return [], ["fireworks-delta-compression is not installed, so its codecs are not in the table"]
    return list(_fireworks(package)), []


def _fireworks(package: Any) -> Iterator[Rival]:
    import torch

    def tensor(words: Words) -> torch.Tensor:
        return torch.from_numpy(words).view(torch.bfloat16)

    for form in ("arc_v2", "arc_v3"):

        def encode(base: Words, target: Words, form: str = form) -> tuple[torch.Tensor, str]:
            diff, checksum = package.delta_compress(src=tensor(base), dst=tensor(target), compression_format=form)
            return diff, checksum

        def apply(data: Words, payload: tuple[torch.Tensor, str], form: str = form) -> Words:
            out = package.delta_decompress(
                src=tensor(data), compressed_diff=payload[0], checksum=payload[1], compression_format=form
            )
            words: Words = out.view(torch.uint16).numpy()
            return words

        yield Rival(f"fireworks {form}", encode, apply, lambda payload: int(payload[0].numel()))
