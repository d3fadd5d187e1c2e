"""Durable file operations, each one a place where a machine can die.

Everything that a refit writes to a disk goes through a :class:`Disk`, so that a test can stop at every single operation and
throw away what was not yet synced.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Buffer", "Disk", "temporary_name"]

Buffer = bytes | bytearray | memoryview

_numbers = itertools.count()


class Disk:
    """The operations. A folder's entries (created, renamed, removed names) are durable after :meth:`sync_folder` only."""

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        """Create or truncate ``path`` and write ``chunks``; not durable yet."""
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def scatter(
        self, path: Path, offset: int, positions: npt.NDArray[np.uint32] | None, values: npt.NDArray[np.unsignedinteger]
    ) -> None:
        """Overwrite elements of a file in place; not durable yet.

        Arguments:
            offset: byte at which element 0 begins; any alignment.
            positions: ascending element numbers [n]; None: 0 to n - 1.
            values: new values [n].
        """
        if not len(values):
            return
        last = len(values) - 1 if positions is None else int(positions[-1])
        unit = values.itemsize
        data = np.memmap(path, np.uint8, "r+", offset, ((last + 1) * unit,))
        data.view(values.dtype)[slice(None) if positions is None else positions] = values

    def sync(self, path: Path) -> None:
        """Make a file's content durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make a folder's entries durable."""
        self.sync(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over whatever was there, in one step."""
        os.replace(source, target)

    def make_folder(self, path: Path) -> None:
        """Create one folder if it is not there."""
        path.mkdir(exist_ok=True)

    def link(self, source: Path, target: Path) -> None:
        """Another name of the same file; a copy where the file system has no hard links."""
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    def copy(self, source: Path, target: Path) -> None:
        """A copy of a file that can be changed alone."""
        shutil.copyfile(source, target)

    def symlink(self, text: str, path: Path) -> None:
        """Create a symbolic link that says ``text``."""
        path.symlink_to(text)

    def remove(self, path: Path) -> None:
        """Remove a file or link; a missing one is no error."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder with all it holds; a missing one is no error."""
        shutil.rmtree(path, ignore_errors=True)

    def make_folders(self, path: Path) -> None:
        """Create a folder and its missing parents, durably."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            self.make_folder(folder)
            self.sync_folder(folder.parent)

    def publish(self, path: Path, chunks: Iterable[Buffer]) -> None:
        """Write a file whole and durably: temporary name, sync, rename, sync the folder."""
        temporary = temporary_name(path)
        try:
            self.write(temporary, chunks)
            self.sync(temporary)
            self.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self.sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other thread or process uses; it starts with a dot."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.tmp")
