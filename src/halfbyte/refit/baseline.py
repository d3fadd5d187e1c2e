"""The baseline: a copy of the last committed version, which the next delta starts from. In memory, or in mapped files.

It is a target like any other: a publisher that starts again brings it to HEAD with a subscriber, which completes what a kill
left half-promoted and fetches only what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import numpy as np

from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.disk import Disk
from halfbyte.refit.errors import CorruptError
from halfbyte.refit.manifest import canonical
from halfbyte.refit.patch import Update

__all__ = ["MappedTensors", "baseline_target"]


class MappedTensors(MutableMapping[str, Bytes]):
    """Flattened tensors in files of a folder, one each, mapped for reading and writing.

    Arguments:
        folder: where; made if missing.
        disk: file operations.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder, self.disk = folder, disk
        self.infos: dict[str, TensorInfo] = {}
        self._maps: dict[str, Bytes] = {}
        disk.make_folders(folder)
        try:
            rows = json.loads((folder / "index.json").read_bytes())
            infos = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in rows]
        except FileNotFoundError:
            infos = []
        except (ValueError, TypeError) as error:
            raise CorruptError(
                "not a baseline's index", where=str(folder / "index.json"), fix="delete the baseline's folder"
            ) from error
        for info in infos:
            path = self.path(info)
            if path.exists() and path.stat().st_size == info.bytes:  # else a kill came before the file was whole
                self.infos[info.name] = info

    def path(self, info: TensorInfo) -> Path:
        """A tensor's file: another dtype or shape is another file."""
        key = canonical([info.name, info.dtype, list(info.shape)])
        return self.folder / f"{hashlib.sha256(key).hexdigest()[:40]}.bin"

    def write(self, info: TensorInfo, data: Bytes) -> Bytes:
        """Make a tensor's file; it counts once :meth:`keep` was called."""
        self.disk.publish(self.path(info), [data.data])
        return self._map(info)

    def keep(self, infos: dict[str, TensorInfo]) -> None:
        """These tensors are the baseline now."""
        rows = [[i.name, i.dtype, list(i.shape)] for i in infos.values()]
        self.disk.publish(self.folder / "index.json", [canonical(rows)])
        used = {self.path(info).name for info in infos.values()}
        for path in sorted(self.folder.glob("*.bin")):
            if path.name not in used:
                self.disk.remove(path)
        self.infos = dict(infos)

    def _map(self, info: TensorInfo) -> Bytes:
        if not info.bytes:
            return np.empty(0, np.uint8)
        return np.memmap(self.path(info), np.uint8, "r+")

    def __getitem__(self, name: str) -> Bytes:
        if name not in self._maps:
            self._maps[name] = self._map(self.infos[name])
        return self._maps[name]

    def __setitem__(self, name: str, data: Bytes) -> None:
        self._maps[name] = data

    def __delitem__(self, name: str) -> None:
        self._maps.pop(name, None)
        self.infos.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos.keys() | self._maps.keys())

    def __len__(self) -> int:
        return len(self.infos.keys() | self._maps.keys())


class _MappedTarget(ArraysTarget):
    """Mapped tensors as a target whose set of tensors may change."""

    def __init__(self, tensors: MappedTensors) -> None:
        super().__init__(tensors, infos=tensors.infos, make=tensors.write, survives=True)
        self._tensors = tensors

    def commit(self, update: Update) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        super().commit(update)
        self._keep(update)

    def rollback(self, update: Update) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        super().rollback(update)
        self._keep(update)

    def _keep(self, update: Update) -> None:
        if any(not change.in_place for change in update.changes):
            self._tensors.keep(dict(self.infos()))


def baseline_target(folder: Path | None, disk: Disk) -> ArraysTarget:
    """An empty or kept baseline.

    Arguments:
        folder: mapped files there; None: memory.
    """
    if folder is not None:
        return _MappedTarget(MappedTensors(folder, disk))
    return ArraysTarget({}, infos={}, make=lambda info, data: np.array(data))
