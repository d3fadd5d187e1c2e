"""A checkpoint folder as a target: each version is a folder of its own, and ``current`` says which one is served.

    root/current -> versions/00000012-3fa9c2d1      a symbolic link, switched in one step
    root/versions/00000012-3fa9c2d1/                an ordinary checkpoint, with ``refit.json``

A new version is a copy of the changed shards, patched, beside hard links to the rest. It is complete and synced before it is
renamed into place, and the link is switched last, so whoever opens ``root/current`` at any moment, before or after any crash,
finds a whole version. Processes that have the old files open keep them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from halfbyte.refit.adapters.arrays import Hooks
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.disk import Disk, temporary_name
from halfbyte.refit.errors import CorruptError, TargetError
from halfbyte.refit.manifest import canonical
from halfbyte.refit.patch import Change, Stamp, Update
from halfbyte.refit.shards import Place, checkpoint_places, shard_chunks

__all__ = ["FolderTarget"]

_STAMP = "refit.json"
_INDEX = "model.safetensors.index.json"


class FolderTarget:
    """See the module's docstring.

    Arguments:
        root: the folder that holds ``current`` and ``versions``; made if missing.
        source: an ordinary checkpoint to begin with, where ``root`` has no version yet. Without one the first refit writes a
            checkpoint of tensors only.
        keep: versions kept, the current one among them.
        hooks: pause, resume and prefix invalidation of whoever serves the folder.
        shard_bytes: size of shards where they have to be written anew.
        disk: file operations.
    """

    survives = False  # nothing is changed in place, so there is nothing half-written to complete

    def __init__(
        self,
        root: Path,
        *,
        source: Path | None = None,
        keep: int = 2,
        hooks: Hooks | None = None,
        shard_bytes: int = 4 << 30,
        disk: Disk | None = None,
    ) -> None:
        self.root, self.keep, self.hooks, self.shard_bytes = root, max(1, keep), hooks or Hooks(), shard_bytes
        self.disk = disk or Disk()
        self.link, self.versions = root / "current", root / "versions"
        self._staged: Path | None = None
        self._before: Path | None = None  # what ``current`` said before a commit
        if not self.link.is_symlink():
            self._begin(source)
        self._open()

    @property
    def current(self) -> Path:
        """The folder of the version served."""
        return self.link.resolve()

    def infos(self) -> Mapping[str, TensorInfo]:
        """See :class:`~halfbyte.refit.target.Target`."""
        return self._infos

    def stamp(self) -> Stamp | None:
        """See :class:`~halfbyte.refit.target.Target`."""
        return self._stamp

    def read(self, name: str) -> Bytes:
        """See :class:`~halfbyte.refit.target.Target`."""
        return self._places[name].read()

    def stage(self, update: Update) -> None:
        """Write the new version's folder, whole and durable."""
        name = f"{update.target.version:08d}-{update.target.state[:8]}"
        if self.current.name == name:
            name += ".repaired"  # the version stays and its bytes do not: damage is repaired in a copy
        final, work = self.versions / name, temporary_name(self.versions / name)
        self.disk.make_folder(work)
        if all(change.in_place for change in update.changes):
            self._patch(update, work)
        else:
            self._rewrite(update, work)
        self._write(work / _STAMP, canonical(asdict(update.target)))
        self.disk.sync_folder(work)
        self.disk.remove_tree(final)  # left by an attempt that went no further
        self.disk.replace(work, final)
        self.disk.sync_folder(self.versions)
        self._staged = final

    def pause(self) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        self.hooks.pause()

    def commit(self, update: Update) -> None:
        """Switch ``current`` to the staged version."""
        if self._staged is None:
            raise TargetError("nothing was staged", where=str(self.root))
        self._before = self.link.readlink() if self.link.is_symlink() else None
        self._switch(Path("versions") / self._staged.name)

    def rollback(self, update: Update) -> None:
        """Switch ``current`` back."""
        if self._before is not None:
            self._switch(self._before)

    def resume(self) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        self.hooks.invalidate_prefixes(self._stamp)
        self.hooks.resume()

    def discard(self, update: Update) -> None:
        """Forget what was staged; remove versions beyond ``keep`` and what killed attempts left."""
        self._staged = self._before = None
        try:
            self._sweep()
        except OSError:
            return  # the next one sweeps

    # ---- a version's folder

    def _begin(self, source: Path | None) -> None:
        """The first version: links to an ordinary checkpoint's files, or nothing."""
        self.disk.make_folders(self.versions)
        self._sweep()
        base = self.versions / "base"
        self.disk.remove_tree(base)
        self.disk.make_folder(base)
        if source is not None:
            if not source.is_dir():
                raise CorruptError("no such checkpoint folder", where=str(source))
            for path in sorted(source.iterdir()):
                if path.is_file():
                    self.disk.link(path, base / path.name)
                    self.disk.sync(base / path.name)
        self.disk.sync_folder(base)
        self.disk.sync_folder(self.versions)
        self._switch(Path("versions") / "base")

    def _patch(self, update: Update, work: Path) -> None:
        """Copies of the shards that change, links to all other files."""
        changes: dict[Path, list[Change]] = {}
        for change in update.changes:
            changes.setdefault(self._places[change.name].path, []).append(change)
        for path in sorted(self.current.iterdir()):
            if path.name == _STAMP or not path.is_file():
                continue
            if path not in changes:
                self.disk.link(path, work / path.name)
                continue
            self.disk.copy(path, work / path.name)
            for change in changes[path]:
                begin = self._places[change.name].begin
                for block in change.blocks:
                    self.disk.scatter(work / path.name, begin + block.begin, block.positions, block.new)
            self.disk.sync(work / path.name)

    def _rewrite(self, update: Update, work: Path) -> None:
        """All tensors anew: some are added, removed or re-shaped."""
        changes = {change.name: change for change in update.changes}
        tensors: dict[str, tuple[TensorInfo, Bytes]] = {}
        for name in sorted(self._infos.keys() | changes.keys()):
            change = changes.get(name)
            if change is None:
                tensors[name] = (self._infos[name], self.read(name))
            elif change.after is not None:
                tensors[name] = (change.after, self._after(change))
        shards = _shards(tensors, self.shard_bytes)
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        names = names if len(shards) > 1 else ["model.safetensors"]
        for name, shard in zip(names, shards, strict=True):
            self.disk.write(work / name, shard_chunks({t: tensors[t] for t in shard}, {"format": "pt"}))
            self.disk.sync(work / name)
        if len(shards) > 1:
            total = sum(info.bytes for info, _ in tensors.values())
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            self._write(work / _INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
        for path in sorted(self.current.iterdir()):
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (_STAMP, _INDEX):
                self.disk.link(path, work / path.name)

    def _after(self, change: Change) -> Bytes:
        if change.new is not None:
            return change.new
        data = self.read(change.name).copy()
        for block in change.blocks:
            unit = block.new.itemsize
            count = block.count if block.positions is None else (data.size - block.begin) // unit
            view = data[block.begin : block.begin + count * unit].view(block.new.dtype)
            view[slice(None) if block.positions is None else block.positions] = block.new
        return data

    def _write(self, path: Path, data: bytes) -> None:
        self.disk.write(path, [data])
        self.disk.sync(path)

    # ---- the link

    def _switch(self, text: Path) -> None:
        temporary = temporary_name(self.link)
        self.disk.symlink(str(text), temporary)
        self.disk.replace(temporary, self.link)
        self.disk.sync_folder(self.root)
        self._open()

    def _open(self) -> None:
        """Read the current version's headers and stamp."""
        self._places: dict[str, Place] = checkpoint_places(self.current)
        self._infos = {name: place.info for name, place in self._places.items()}
        path = self.current / _STAMP
        try:
            self._stamp = Stamp(**json.loads(path.read_bytes())) if path.exists() else None
        except (ValueError, TypeError) as error:
            raise CorruptError(
                "not a refit stamp", where=str(path), fix="delete this file; its version is found anew"
            ) from error

    def _sweep(self) -> None:
        current = self.link.readlink().name if self.link.is_symlink() else ""
        whole = sorted(p for p in self.versions.iterdir() if not p.name.startswith("."))
        old = [p for p in whole if p.name != current]
        old.sort(key=lambda p: p.stat().st_mtime)
        for path in old[: max(0, len(old) - (self.keep - 1))]:
            self.disk.remove_tree(path)
        for path in sorted(self.versions.glob(".*.tmp")):
            self.disk.remove_tree(path)
        for path in sorted(self.root.glob(".current.*.tmp")):
            self.disk.remove(path)


def _shards(tensors: Mapping[str, tuple[TensorInfo, Bytes]], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, (info, _) in tensors.items():
        if shards[-1] and size + info.bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.bytes
    return shards
