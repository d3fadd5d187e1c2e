"""A disk that loses power at the k-th operation, and with it everything that was not synced."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfbyte.refit.disk import Buffer, Disk, temporary_name
from halfbyte.refit.store.faults import Crash


class CrashingDisk(Disk):
    """Counts operations; raises Crash in operation ``at`` (None: never), after half of its work where it has halves.

    At the crash, files written but not synced lose their second half, and renames whose folder was not synced are undone:
    the worst that a journalling file system may do.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0
        self.log: list[str] = []
        self._unsynced: set[Path] = set()
        self._renames: list[tuple[Path, Path, Path | None]] = []  # (source, target, what the target was before)

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self._step("write", path, lambda: super(CrashingDisk, self).write(path, [data[: len(data) // 2]]))
        super().write(path, [data])
        self._unsynced.add(path)

    def scatter(self, path: Path, offset: int, positions: Any, values: Any) -> None:
        half = len(values) // 2
        first = None if positions is None else positions[:half]
        self._step("scatter", path, lambda: super(CrashingDisk, self).scatter(path, offset, first, values[:half]))
        super().scatter(path, offset, positions, values)

    def sync(self, path: Path) -> None:
        self._step("sync", path)  # what is synced is known here; the real disk need not be waited for
        self._unsynced.discard(path)

    def sync_folder(self, path: Path) -> None:
        self._step("sync_folder", path)
        self._renames = [item for item in self._renames if item[1].parent != path]

    def replace(self, source: Path, target: Path) -> None:
        self._step("replace", target)
        kept = None
        if target.is_symlink() or target.is_file():
            kept = temporary_name(target)
            if target.is_symlink():
                kept.symlink_to(os.readlink(target))
            else:
                os.link(target, kept)
        super().replace(source, target)
        if source in self._unsynced:
            self._unsynced.discard(source)
            self._unsynced.add(target)
        self._renames.append((source, target, kept))

    def make_folder(self, path: Path) -> None:
        self._step("make_folder", path)
        super().make_folder(path)

    def link(self, source: Path, target: Path) -> None:
        self._step("link", target)
        super().link(source, target)

    def copy(self, source: Path, target: Path) -> None:
        self._step("copy", target, lambda: target.write_bytes(source.read_bytes()[: source.stat().st_size // 2]))
        super().copy(source, target)
        self._unsynced.add(target)

    def symlink(self, text: str, path: Path) -> None:
        self._step("symlink", path)
        super().symlink(text, path)

    def remove(self, path: Path) -> None:
        self._step("remove", path)
        super().remove(path)

    def remove_tree(self, path: Path) -> None:
        self._step("remove_tree", path, lambda: self._remove_half(path))
        super().remove_tree(path)

    @staticmethod
    def _remove_half(path: Path) -> None:
        files = sorted(p for p in path.rglob("*") if p.is_file())
        for file in files[: len(files) // 2]:
            file.unlink()

    def _step(self, kind: str, path: Path, half: Any = None) -> None:
        number, self.count = self.count, self.count + 1
        self.log.append(f"{kind} {path.name}")
        if number != self.at:
            return
        if half is not None:
            half()
            if kind in ("write", "copy"):
                self._unsynced.discard(path)
        self._lose_power()
        raise Crash(f"operation {number}: {kind} {path}")

    def _lose_power(self) -> None:
        for source, target, kept in reversed(self._renames):
            if target.is_symlink() or target.exists():
                os.replace(target, source)
                if target in self._unsynced:
                    self._unsynced.discard(target)
                    self._unsynced.add(source)
            if kept is not None:
                os.replace(kept, target)
        for path in self._unsynced:
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)

    def clean(self) -> None:
        """Remove the copies kept for undoing renames."""
        for _, _, kept in self._renames:
            if kept is not None:
                kept.unlink(missing_ok=True)
