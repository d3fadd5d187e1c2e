"""Safetensors files: read through a memory map after a full check of the header, written atomically.

The format (https://github.com/huggingface/safetensors): eight bytes with the header's length, little-endian; a JSON
header name -> {dtype, shape, data_offsets}; the data. We check every header ourselves before a byte of it is trusted,
so a truncated or hostile file is a clear error and never a wrong tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.errors import CheckpointError

__all__ = ["DTYPES", "DTYPE_NAMES", "Entry", "SafetensorsFile", "read_header", "write_safetensors"]

#: Name of a dtype in the format -> torch dtype.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
#: torch dtype -> its name in the format.
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_MOST_DIMENSIONS = 64  # what torch can hold
_HEADER_LIMIT = 100_000_000  # the format's own limit, bytes


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: dtype, shape, and byte range [begin, end) counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(Mapping[str, torch.Tensor]):
    """A file as a mapping from name to tensor, without reading the data first.

    Tensors are views of a private memory map: reading one touches only its own pages, and a write to one stays in
    memory and never reaches the file. The map lives as long as a tensor of it.

    Raises:
        CheckpointError: see :func:`read_header`; unknown names raise KeyError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.entries, self.metadata = read_header(self.path)
        with self.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        n_bytes = entry.end - entry.begin
        if n_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.begin % entry.dtype.itemsize:  # unaligned data cannot be viewed in place
            data = torch.frombuffer(self._map, dtype=torch.uint8, count=n_bytes, offset=entry.begin).clone()
            return data.view(entry.dtype).view(entry.shape)
        count = n_bytes // entry.dtype.itemsize
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.begin).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read and check a header: (entries in file order, metadata).

    Checked: the file is as long as the header says, to the byte; every dtype is known; every shape has as many bytes as
    its range; ranges neither overlap nor leave holes; no name appears twice.

    Raises:
        CheckpointError: the file is missing, or any of these does not hold.
    """
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _bad(path, f"{length} bytes are too few for a safetensors file")
            (header_length,) = struct.unpack("<Q", prefix)
            if header_length > min(_HEADER_LIMIT, length - 8):
                raise _bad(path, f"the header claims {header_length} bytes, the file has {length}")
            raw = file.read(header_length)
    except OSError as error:
        raise CheckpointError(f"cannot read the tensor file: {error.strerror}", where=str(path)) from error
    start = 8 + header_length
    if not raw.startswith(b"{"):
        raise _bad(path, "the header is not an object")
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # RecursionError: a hostile header of nested brackets
        raise _bad(path, f"the header is not valid JSON ({error})") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise _bad(path, "__metadata__ is not a table of strings")
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = start
    for name, entry in ordered.items():
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "follows a hole"
            raise _bad(path, f"tensor {name!r} {kind}")
        position = entry.end
    if position != length:
        kind = "cut short" if length < position else "too long"
        raise _bad(path, f"{kind}: it has {length} bytes and its header describes {position}")
    return ordered, metadata


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors in the mapping's order, one at a time, without holding a second copy of them all.

    The file appears under its name only when complete and on disk: temporary name, fsync, rename.

    Arguments:
        path: the file to write or replace.
        tensors: CPU or device tensors of any strides; a lazy mapping is read twice (shapes, then data).
        metadata: strings for ``__metadata__``; transformers wants ``{"format": "pt"}``.
    Raises:
        CheckpointError: a dtype that the format does not have.
    """
    target = Path(path)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"safetensors cannot hold tensor {name!r} of {tensor.dtype}", where=str(target))
        end = position + tensor.numel() * tensor.dtype.itemsize
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)))
            file.write(encoded)
            for tensor in tensors.values():
                flat = tensor.detach().to("cpu").contiguous().reshape(-1)
                if flat.numel():
                    file.write(flat.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _entry(path: Path, name: str, value: object, start: int) -> Entry:
    if not isinstance(value, dict):
        raise _bad(path, f"the entry of tensor {name!r} is not an object")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value.get("dtype"), str) else None
    if dtype is None:
        raise CheckpointError(
            f"tensor {name!r} has unknown dtype {value.get('dtype')!r}", where=str(path), expected=", ".join(DTYPES)
        )
    shape, offsets = (_naturals(path, name, key, value.get(key)) for key in ("shape", "data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"tensor {name!r} has data_offsets {list(offsets)}")
    begin, end = offsets
    if len(shape) > _MOST_DIMENSIONS:
        raise _bad(path, f"tensor {name!r} has {len(shape)} dimensions")
    if any(size >= 2**63 for size in (*shape, end)):
        raise _bad(path, f"tensor {name!r} has a size or offset of 2**63 or more")
    n_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != n_bytes:
        raise _bad(path, f"tensor {name!r} of shape {list(shape)} needs {n_bytes} bytes, its range has {end - begin}")
    return Entry(dtype, shape, start + begin, start + end)


def _naturals(path: Path, name: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        shown = repr(value)
        raise _bad(path, f"tensor {name!r} has {key} {shown if len(shown) <= 80 else f'{shown[:77]}...'}")
    return tuple(value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"unusable safetensors file: {what}", where=str(path), fix="copy or download it again and compare its size"
    )
