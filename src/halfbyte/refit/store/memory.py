"""A store in this process, for tests and for a trainer and an engine that share a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from halfbyte.refit.errors import ObjectMissingError, StoreConflictError, StoreError
from halfbyte.refit.store.protocol import Buffer, Cell, Entry, check_key

__all__ = ["MemoryStore"]


class MemoryStore:
    """A dictionary behind a lock.

    Arguments:
        clock: seconds since 1970; a test may give its own.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float, int]] = {}
        self._writes = 0

    def __repr__(self) -> str:
        return "MemoryStore()"

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        data = self._find(key)[0]
        if limit is not None and len(data) > limit:
            raise StoreError(f"{len(data)} bytes, at most {limit} are accepted", where=f"{self}: {key}")
        return data

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        return self._find(key)[0][begin : max(begin, end)]

    def read_cell(self, key: str) -> Cell | None:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        try:
            data, _, number = self._find(key)
        except ObjectMissingError:
            return None
        return Cell(data, str(number))

    def put(self, key: str, data: Buffer) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        with self._lock:
            self._write(key, data)

    def swap(self, key: str, data: Buffer, expected: str | None) -> str:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        with self._lock:
            found = self._objects.get(check_key(key))
            if (str(found[2]) if found else None) != expected:
                raise StoreConflictError("the cell has changed since it was read", where=f"{self}: {key}")
            return str(self._write(key, data))

    def list(self, prefix: str) -> Iterator[Entry]:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        start = check_key(prefix) + "/"
        with self._lock:
            found = sorted((k, len(v[0]), v[1]) for k, v in self._objects.items() if k.startswith(start))
        return iter([Entry(*item) for item in found])

    def delete(self, key: str) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        with self._lock:
            self._objects.pop(check_key(key), None)

    def _find(self, key: str) -> tuple[bytes, float, int]:
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None:
            raise ObjectMissingError("the store has no such key", where=f"{self}: {key}")
        return found

    def _write(self, key: str, data: Buffer) -> int:
        self._writes += 1
        self._objects[check_key(key)] = (bytes(data), self._clock(), self._writes)
        return self._writes
