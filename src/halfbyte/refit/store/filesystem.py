"""A folder as a store: local disk or a shared file system with ``flock``."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfbyte.refit.disk import Disk
from halfbyte.refit.errors import ObjectMissingError, StoreConflictError, StoreError, StoreUnavailableError
from halfbyte.refit.store.protocol import Buffer, Cell, Entry, check_key

__all__ = ["FilesystemStore"]

_ABANDONED = 3600.0  # seconds after which a temporary file belongs to nobody


class FilesystemStore:
    """Objects are files, written under a temporary name, synced and renamed; cells are swapped under a lock.

    The lock is the kernel's (``flock``): it goes with its process, so a killed publisher never blocks the next one.

    Arguments:
        root: the folder; made when something is first written.
        disk: the file operations.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        self.root = Path(root)
        self.disk = disk or Disk()

    def __repr__(self) -> str:
        return f"FilesystemStore({str(self.root)!r})"

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        with self._reading(key) as path, path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if limit is not None and size > limit:
                raise StoreError(f"{size} bytes, at most {limit} are accepted", where=f"{self}: {key}")
            return file.read()

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        with self._reading(key) as path, path.open("rb") as file:
            file.seek(begin)
            return file.read(max(0, end - begin))

    def read_cell(self, key: str) -> Cell | None:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        try:
            data = self.get(key)
        except ObjectMissingError:
            return None
        return Cell(data, _tag(data))

    def put(self, key: str, data: Buffer) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        path = self.root / check_key(key)
        with self._writing(key):
            self.disk.make_folders(path.parent)
            self.disk.publish(path, [data])

    def swap(self, key: str, data: Buffer, expected: str | None) -> str:
        """See :class:`~halfbyte.refit.store.protocol.Store`. Tags are digests: contents of a cell must not recur."""
        path = self.root / check_key(key)
        with self._writing(key):
            self.disk.make_folders(path.parent)
            with (self.root / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = self.read_cell(key)
                if (found.tag if found else None) != expected:
                    raise StoreConflictError("the cell has changed since it was read", where=f"{self}: {key}")
                self.disk.publish(path, [data])
        return _tag(data)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        folder = self.root / check_key(prefix)
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(self.root)
            if any(part.startswith(".") for part in relative.parts):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # deleted while we listed
            if path.is_file():
                yield Entry(relative.as_posix(), status.st_size, status.st_mtime)

    def delete(self, key: str) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        with self._writing(key):
            self.disk.remove(self.root / check_key(key))

    def sweep(self) -> int:
        """Remove temporary files that a killed writer left more than an hour ago; how many."""
        removed, now = 0, time.time()
        for path in self.root.rglob(".*.tmp"):
            try:
                if now - path.stat().st_mtime > _ABANDONED:
                    self.disk.remove(path)
                    removed += 1
            except FileNotFoundError:
                continue
        return removed

    @contextmanager
    def _reading(self, key: str) -> Iterator[Path]:
        try:
            yield self.root / check_key(key)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissingError("the store has no such key", where=f"{self}: {key}") from error
        except OSError as error:
            raise StoreUnavailableError(f"cannot read: {error.strerror}", where=f"{self}: {key}") from error

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot write: {error.strerror}",
                where=f"{self}: {key}",
                fix="free space or check permissions, then retry",
            ) from error


def _tag(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()
