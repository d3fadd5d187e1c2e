"""Safetensors files of ordinary checkpoints: where each tensor lies, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.errors import CorruptError
from halfbyte.refit.objects import HEADER_LIMIT

__all__ = ["Place", "checkpoint_places", "read_shard", "shard_chunks"]


@dataclass(frozen=True)
class Place:
    """A tensor in a file: bytes [begin, begin + info.bytes)."""

    path: Path
    info: TensorInfo
    begin: int

    def read(self) -> Bytes:
        """The tensor's bytes, mapped read-only."""
        if not self.info.bytes:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.begin, (self.info.bytes,))


def checkpoint_places(folder: Path) -> dict[str, Place]:
    """Every tensor of a checkpoint folder (all its safetensors files).

    Raises:
        CorruptError: a file is damaged, or two files hold the same tensor.
    """
    found: dict[str, Place] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, place in read_shard(path).items():
            if name in found:
                raise CorruptError(f"tensor {name!r} is in {found[name].path.name} as well", where=str(path))
            found[name] = place
    return found


def read_shard(path: Path) -> dict[str, Place]:
    """Tensors of one file; the header is checked whole before any of it is believed.

    Raises:
        CorruptError: truncated, or a header that does not describe the file to the byte.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - 8):
            raise CorruptError(f"a header of {length} bytes in a file of {size}", where=str(path))
        raw = file.read(length)
    found: dict[str, Place] = {}
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        rows = sorted(
            (e["data_offsets"][0], e["data_offsets"][1], n, e["dtype"], tuple(e["shape"])) for n, e in header.items()
        )
        position = 0
        for begin, end, name, dtype, shape in rows:
            info = TensorInfo(name, dtype, shape)
            if begin != position or end - begin != info.bytes:
                raise CorruptError(f"tensor {name!r} does not fill its place", where=str(path))
            found[name], position = Place(path, info, 8 + length + begin), end
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CorruptError("not a safetensors header", where=str(path)) from error
    except RefitError as error:
        raise CorruptError(str(error).split("\n", 1)[0], where=str(path)) from error
    if 8 + length + position != size:
        raise CorruptError(f"{size} bytes, the header describes {8 + length + position}", where=str(path))
    return found


def shard_chunks(
    tensors: Mapping[str, tuple[TensorInfo, Bytes]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """A file's bytes, piece by piece, in the mapping's order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (info, _) in tensors.items():
        offsets = [position, position + info.bytes]
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
        position += info.bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield struct.pack("<Q", len(encoded)) + encoded
    for _, data in tensors.values():
        yield np.ascontiguousarray(data).data
