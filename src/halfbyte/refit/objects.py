"""Objects: immutable safetensors files of U8 entries, named by their content.

An object of a delta holds one entry a patched tensor (``TensorDelta.to_bytes``); an object of a full version holds the
tensors' bytes. Any safetensors reader opens it. Ours checks every byte of the header before it believes one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes

__all__ = ["HEADER_LIMIT", "ObjectReader", "content_hash", "read_object", "write_object"]

#: The format's own limit of the header, bytes.
HEADER_LIMIT = 100_000_000
_KEYS = {"dtype", "shape", "data_offsets"}


def content_hash(data: bytes | memoryview | Bytes) -> str:
    """SHA-256 in hex: the object's name in every store."""
    return hashlib.sha256(_view(data)).hexdigest()


def write_object(entries: Mapping[str, bytes | memoryview | Bytes], metadata: Mapping[str, str] | None = None) -> bytes:
    """The file's bytes; the same entries give the same bytes, in whatever order they come.

    Arguments:
        entries: name -> bytes; uint8 arrays must be one-dimensional and contiguous.
        metadata: strings for ``__metadata__``.
    Raises:
        RefitError: an entry named ``__metadata__``.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in sorted(entries):
        if name == "__metadata__":
            raise RefitError("an object cannot hold an entry named __metadata__")
        end = position + _view(entries[name]).nbytes
        header[name] = {"dtype": "U8", "shape": [end - position], "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return b"".join([struct.pack("<Q", len(encoded)), encoded, *(_view(entries[name]) for name in sorted(entries))])


def read_object(
    data: bytes | memoryview | Bytes, *, digest: str | None = None, where: str = "object"
) -> dict[str, Bytes]:
    """Entries of an object, as read-only views of ``data``.

    Arguments:
        digest: what the content hash must be; None where the caller checked it.
        where: for messages.
    Raises:
        RefitError: other content, or a file that is not exactly such an object.
    """
    if digest is not None and (found := content_hash(data)) != digest:
        raise RefitError(
            f"the object's content hash is {found}",
            where=where,
            expected=digest,
            fix="fetch it again; then repair the store",
        )
    return dict(ObjectReader(data, where=where))


class ObjectReader(Mapping[str, Bytes]):
    """An object's entries by name; ``metadata`` has its strings."""

    def __init__(self, data: bytes | memoryview | Bytes, *, where: str = "object") -> None:
        flat = np.frombuffer(data, np.uint8)
        flat.flags.writeable = False
        self._data = flat
        self._spans, self.metadata = _read_header(flat, where)

    def __getitem__(self, name: str) -> Bytes:
        begin, end = self._spans[name]
        return self._data[begin:end]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


def _read_header(data: Bytes, where: str) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    if data.size < 8:
        raise _bad(where, f"{data.size} bytes are too few")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(HEADER_LIMIT, data.size - 8):
        raise _bad(where, f"the header claims {length} bytes, the object has {data.size}")
    start = 8 + length
    try:
        header = json.loads(data[8:start].tobytes().decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"the header is not valid JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise _bad(where, "the header is not a table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise _bad(where, "__metadata__ is not a table of strings")
    spans: dict[str, tuple[int, int]] = {}
    position = 0
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != _KEYS or entry["dtype"] != "U8":
            raise _bad(where, f"entry {name[:80]!r} is not one of U8 bytes")
        offsets, shape = entry["data_offsets"], entry["shape"]
        if not _naturals(offsets, 2) or not _naturals(shape, 1) or offsets[1] - offsets[0] != shape[0]:
            raise _bad(where, f"entry {name[:80]!r} has shape and offsets that do not fit")
        if offsets[0] != position:
            raise _bad(where, f"entry {name[:80]!r} overlaps the one before it or follows a hole")
        spans[name] = (start + position, start + offsets[1])
        position = offsets[1]
    if start + position != data.size:
        raise _bad(where, f"it has {data.size} bytes and its header describes {start + position}")
    return spans, metadata


def _view(data: bytes | memoryview | Bytes) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


def _naturals(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(item) is int and item >= 0 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _bad(where: str, what: str) -> RefitError:
    return RefitError(f"unusable object: {what}", where=where, fix="fetch it again; then repair the store")
