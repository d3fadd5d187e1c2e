"""Shards of foreign deltas: safetensors files whose tensors are one-dimensional U8 streams and whose metadata are strings."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.errors import CorruptError

__all__ = ["read_shard", "write_shard"]

_HEADER_LIMIT = 100_000_000  # the format's own, bytes


def read_shard(data: bytes, where: str) -> tuple[dict[str, Bytes], dict[str, str]]:
    """Streams by name (views of ``data``) and the metadata.

    Raises:
        CorruptError: not a safetensors file, cut short, with ranges that overlap or leave holes, a name twice, or a tensor
            that is no stream of bytes.
    """

    def bad(what: str) -> CorruptError:
        return CorruptError(
            f"unusable shard: {what}", where=where, expected="safetensors with one-dimensional U8 tensors"
        )

    if len(data) < 8:
        raise bad(f"{len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(_HEADER_LIMIT, len(data) - 8):
        raise bad(f"the header claims {length} bytes, the file has {len(data)}")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise bad(f"the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise bad("the header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise bad("__metadata__ is not a table of strings")
    whole = np.frombuffer(data, np.uint8)[8 + length :]
    ranges = sorted((*_range(entry, name, bad), name) for name, entry in header.items())
    position = 0
    for begin, end, name in ranges:
        if begin != position:
            raise bad(f"{name!r} begins at {begin}, the tensor before it ends at {position}")
        position = end
    if position != len(whole):
        raise bad(f"{len(whole)} bytes of data, the header describes {position}")
    return {name: whole[begin:end] for begin, end, name in ranges}, metadata


def write_shard(streams: Mapping[str, Bytes], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The parts of a shard file, in order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, stream in streams.items():
        header[name] = {"dtype": "U8", "shape": [len(stream)], "data_offsets": [position, position + len(stream)]}
        position += len(stream)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return [struct.pack("<Q", len(encoded)), encoded, *(stream.data for stream in streams.values())]


def _range(entry: Any, name: str, bad: Any) -> tuple[int, int]:
    if not isinstance(entry, dict) or entry.get("dtype") != "U8":
        raise bad(f"{name!r} is not U8")
    offsets, shape = entry.get("data_offsets"), entry.get("shape")
    for numbers, count in ((offsets, 2), (shape, 1)):
        fine = isinstance(numbers, list) and len(numbers) == count
        if not fine or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise bad(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}")
    if offsets[1] - offsets[0] != shape[0]:
        raise bad(f"{name!r} has shape {shape!r} and data_offsets {offsets!r}")
    return offsets[0], offsets[1]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name appears twice")
    return out
