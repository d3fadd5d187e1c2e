"""Tensors in one file or cut along their first dimension into a file a rank, each rank writing its own; read by rows.

The files are those of ``torch.distributed.checkpoint`` with its safetensors writer (``HuggingFaceStorageWriter``): ordinary
safetensors whose metadata says at which offset each shard lies. Its reader reads ours, we read its, and neither needs the
pickled ``.metadata`` of its default format. Reading takes no process group: any rows of any tensor, whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.models.safetensors_io import SafetensorsFile, write_safetensors

__all__ = ["ShardedTensors", "open_tensors", "shard_path", "write_shard"]

_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def shard_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_shard(folder: Path, rank: int, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> None:
    """Write a rank's rows of each tensor; ``first_rows`` tells where they begin (0 where it does not)."""
    folder.mkdir(parents=True, exist_ok=True)
    offsets = {
        n: {_OFFSETS: [first_rows.get(n, 0)] + [0] * (t.dim() - 1) if t.dim() else []} for n, t in tensors.items()
    }
    metadata = {_INFO: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    write_safetensors(shard_path(folder, rank), tensors, metadata)


def open_tensors(folder: Path, name: str) -> ShardedTensors:
    """``folder/name.safetensors``, or the shards in ``folder/name/``.

    Raises:
        CheckpointError: neither is there, or a file is damaged.
    """
    whole = folder / f"{name}.safetensors"
    files = [whole] if whole.exists() else sorted((folder / name).glob("*.safetensors"))
    if not files:
        raise CheckpointError("no tensors", where=str(whole), expected=f"that file, or shards in {folder / name}")
    return ShardedTensors(files)


class ShardedTensors(Mapping[str, Tensor]):
    """Tensors by name, put together from the files that hold parts of them.

    Raises:
        CheckpointError: a file is damaged, says nothing sensible of its offsets, or a part is missing.
    """

    def __init__(self, files: list[Path]) -> None:
        self._parts: dict[str, list[tuple[int, SafetensorsFile]]] = {}
        self.where = str(files[0].parent)
        for path in files:
            file = SafetensorsFile(path)
            begins = _first_rows(file, path)
            for name in file:
                self._parts.setdefault(name, []).append((begins.get(name, 0), file))
        for name, parts in self._parts.items():
            parts.sort(key=lambda part: part[0])
            end, rest = 0, parts[0][1].entries[name].shape[1:]
            for begin, file in parts:
                shape = file.entries[name].shape
                if begin != end or (len(parts) > 1 and (not shape or shape[1:] != rest)):
                    raise CheckpointError(
                        f"shards of tensor {name!r} leave a hole, overlap or differ in shape",
                        where=str(file.path),
                        fix="the checkpoint misses a file, or holds one of another run",
                    )
                end += shape[0] if shape else 1

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        tensors = [file[name] for _, file in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        begin, file = self._parts[name][-1]
        shape = file.entries[name].shape
        return (begin + shape[0], *shape[1:]) if shape else ()

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a tensor."""
        found = []
        for first, file in self._parts[name]:
            count = file.entries[name].shape[0]
            low, high = max(begin, first), min(end, first + count)
            if low < high:
                found.append(file[name][low - first : high - first])
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else self._parts[name][0][1][name][:0]


def _first_rows(file: SafetensorsFile, path: Path) -> dict[str, int]:
    if _INFO not in file.metadata:
        return {}
    try:
        table = json.loads(file.metadata[_INFO])
        out = {}
        for name, entry in file.entries.items():
            offsets = table[name][_OFFSETS]
            if (
                len(offsets) != len(entry.shape)
                or any(type(o) is not int or o < 0 for o in offsets)
                or any(offsets[1:])
            ):
                raise ValueError(f"offsets {offsets} of tensor {name!r}")
            out[name] = offsets[0] if offsets else 0
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"unusable {_INFO}: {error}", where=str(path), expected="shards of rows") from error
    return out
