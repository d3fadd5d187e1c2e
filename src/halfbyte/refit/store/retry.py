"""Patience with a store that is unavailable for a moment."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from halfbyte.refit.errors import StoreConflictError, StoreError, StoreUnavailableError
from halfbyte.refit.store.protocol import Buffer, Cell, Entry, ReadStore, Store

__all__ = ["Retrying"]

_T = TypeVar("_T")


class Retrying:
    """A store whose operations are repeated after :class:`StoreUnavailableError`, with growing, jittered pauses.

    A swap whose answer was lost may have happened. Contents of a cell never recur, so it is settled by reading the cell: if
    it holds what we wrote, we won.

    Arguments:
        store: the store; one that can only be read is fine until something is written.
        attempts: how often an operation is tried in all.
        pause: seconds before the second attempt; doubles each time, up to ``longest``.
        sleep: waits.
    """

    def __init__(
        self,
        store: Store | ReadStore,
        *,
        attempts: int = 5,
        pause: float = 0.2,
        longest: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store, self.attempts, self.pause, self.longest, self.sleep = store, attempts, pause, longest, sleep

    def __repr__(self) -> str:
        return repr(self.store)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        return self._try(lambda: self.store.get(key, limit=limit))

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        return self._try(lambda: self.store.get_range(key, begin, end))

    def read_cell(self, key: str) -> Cell | None:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        return self._try(lambda: self.store.read_cell(key))

    def put(self, key: str, data: Buffer) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        store = self._writable()
        self._try(lambda: store.put(key, data))

    def swap(self, key: str, data: Buffer, expected: str | None) -> str:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        store, unsure = self._writable(), False

        def attempt() -> str:
            nonlocal unsure
            try:
                return store.swap(key, data, expected)
            except StoreUnavailableError:
                unsure = True
                raise
            except StoreConflictError:
                found = store.read_cell(key) if unsure else None
                if found is not None and found.data == bytes(data):
                    return found.tag
                raise

        return self._try(attempt)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        store = self._writable()
        return iter(self._try(lambda: [*store.list(prefix)]))

    def delete(self, key: str) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        store = self._writable()
        self._try(lambda: store.delete(key))

    def _writable(self) -> Store:
        if not isinstance(self.store, Store):
            raise StoreError(
                "this store can only be read", where=repr(self.store), fix="use the folder or bucket itself"
            )
        return self.store

    def _try(self, operation: Callable[[], _T]) -> _T:
        pause = self.pause
        for _ in range(self.attempts - 1):
            try:
                return operation()
            except StoreUnavailableError:
                self.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, self.longest)
        return operation()
