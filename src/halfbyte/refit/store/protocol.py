"""What a refit asks of a store: immutable objects by key, and small cells that are compared and swapped.

Keys are relative paths of ``[A-Za-z0-9._-]`` segments; nothing else reaches a file system or an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from halfbyte.refit.errors import StoreError

__all__ = ["Buffer", "Cell", "Entry", "ReadStore", "Store", "check_key"]

Buffer = bytes | bytearray | memoryview

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_MOST_SEGMENTS = 8


@dataclass(frozen=True)
class Cell:
    """A small mutable value as it was read.

    Arguments:
        data: its bytes.
        tag: what :meth:`Store.swap` compares; opaque.
    """

    data: bytes
    tag: str


@dataclass(frozen=True)
class Entry:
    """A key as listed.

    Arguments:
        key: its name.
        size: bytes.
        modified: seconds since 1970 by the store's own clock.
    """

    key: str
    size: int
    modified: float


@runtime_checkable
class ReadStore(Protocol):
    """What a subscriber needs. Safe to call from several threads."""

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """All bytes of ``key``.

        Arguments:
            limit: the most bytes the caller is ready to hold; a longer value is refused before it is read.
        Raises:
            ObjectMissingError, StoreUnavailableError, StoreError.
        """
        ...

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of ``key``; shorter where the object ends earlier. Raises as :meth:`get`."""
        ...

    def read_cell(self, key: str) -> Cell | None:
        """A cell, or None where there is none yet. Raises as :meth:`get`."""
        ...


@runtime_checkable
class Store(ReadStore, Protocol):
    """What a publisher, a lease and garbage collection need."""

    def put(self, key: str, data: Buffer) -> None:
        """Write ``key`` whole; when this returns it is durable, and nobody ever sees a part of it."""
        ...

    def swap(self, key: str, data: Buffer, expected: str | None) -> str:
        """Replace a cell if its tag is ``expected`` (None: if there is none yet), as one step; the new tag.

        Raises:
            StoreConflictError: it is not; nothing was written.
        """
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """All keys under ``prefix`` (whole segments), in order."""
        ...

    def delete(self, key: str) -> None:
        """Remove ``key``; a key that is not there is no error."""
        ...


def check_key(key: str) -> str:
    """``key``, if it is one.

    Raises:
        StoreError: an absolute path, ``..``, an empty segment, or a character outside ``[A-Za-z0-9._-]``.
    """
    segments = key.split("/")
    if len(segments) > _MOST_SEGMENTS or not all(_SEGMENT.fullmatch(s) for s in segments):
        raise StoreError(
            f"{key!r} is not a key", expected="relative, segments of [A-Za-z0-9._-] that do not start with a dot"
        )
    return key
