"""A store that fails on purpose, at any operation one names: for tests of everything built on a store.

The faults are those that stores really show: an error before the operation, an error after it was done (the answer was
lost), the death of the calling process on either side, and damaged bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from halfbyte.refit.errors import StoreConflictError, StoreError, StoreUnavailableError
from halfbyte.refit.store.protocol import Buffer, Cell, Entry, Store

__all__ = ["Crash", "Fault", "FaultyStore", "Operation"]

_T = TypeVar("_T")


class Crash(BaseException):
    """The process dies here. Not an ``Exception``: nothing may handle it."""


@dataclass(frozen=True)
class Operation:
    """One call: its number (from 0), what it does (``get``, ``put``, ...), its key."""

    number: int
    kind: str
    key: str


@dataclass(frozen=True)
class Fault:
    """What happens to an operation.

    Arguments:
        error: an HTTP status (409, 412, 503, ...) or ``"crash"``; None lets it pass.
        after: the operation is done, then the error is raised.
        damage: applied to bytes read, or to bytes before they are written.
    """

    error: int | str | None = None
    after: bool = False
    damage: Callable[[bytes], bytes] | None = None


class FaultyStore:
    """Passes every call to ``store`` after asking ``plan`` what goes wrong.

    Arguments:
        store: the real one.
        plan: operation -> fault, or None for none.
    """

    def __init__(self, store: Store, plan: Callable[[Operation], Fault | None] = lambda operation: None) -> None:
        self.store, self.plan = store, plan
        self.operations: list[Operation] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FaultyStore({self.store!r})"

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        return self._do("get", key, lambda fault: _damaged(fault, self.store.get(key, limit=limit)))

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        return self._do("get_range", key, lambda fault: _damaged(fault, self.store.get_range(key, begin, end)))

    def read_cell(self, key: str) -> Cell | None:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""

        def read(fault: Fault) -> Cell | None:
            cell = self.store.read_cell(key)
            return cell and Cell(_damaged(fault, cell.data), cell.tag)

        return self._do("read_cell", key, read)

    def put(self, key: str, data: Buffer) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        self._do("put", key, lambda fault: self.store.put(key, _damaged(fault, bytes(data))))

    def swap(self, key: str, data: Buffer, expected: str | None) -> str:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        return self._do("swap", key, lambda fault: self.store.swap(key, _damaged(fault, bytes(data)), expected))

    def list(self, prefix: str) -> Iterator[Entry]:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        return iter(self._do("list", prefix, lambda fault: [*self.store.list(prefix)]))

    def delete(self, key: str) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        self._do("delete", key, lambda fault: self.store.delete(key))

    def _do(self, kind: str, key: str, call: Callable[[Fault], _T]) -> _T:
        with self._lock:
            operation = Operation(len(self.operations), kind, key)
            self.operations.append(operation)
        fault = self.plan(operation) or Fault()
        if fault.error is not None and not fault.after:
            raise _error(fault.error, operation)
        result = call(fault)
        if fault.error is not None:
            raise _error(fault.error, operation)
        return result


def _damaged(fault: Fault, data: bytes) -> bytes:
    return fault.damage(data) if fault.damage else data


def _error(error: int | str, operation: Operation) -> BaseException:
    where = f"operation {operation.number}: {operation.kind} {operation.key}"
    if error == "crash":
        return Crash(where)
    kind = (
        StoreConflictError if error in (409, 412) else StoreUnavailableError if error in (429, 500, 503) else StoreError
    )
    return kind(f"HTTP {error} (injected)", where=where)
