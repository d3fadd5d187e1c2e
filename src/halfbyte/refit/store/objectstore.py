"""Object stores (S3 and compatible, Google, Azure, memory) through obstore; cells by conditional writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from halfbyte.errors import MissingExtraError
from halfbyte.refit.errors import (
    ObjectMissingError,
    StoreConflictError,
    StoreError,
    StoreUnavailableError,
)
from halfbyte.refit.store.protocol import Buffer, Cell, Entry, check_key

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

__all__ = ["ObjectStore"]

_FOR_EVER = (
    "PermissionDeniedError",
    "UnauthenticatedError",
    "InvalidPathError",
    "NotSupportedError",
    "UnknownConfigurationKeyError",
)


class ObjectStore:
    """A bucket, or a prefix of one.

    Swaps need conditional writes: S3 itself, Google, Azure, MinIO and obstore's memory have them; obstore's local files
    do not (use :class:`~halfbyte.refit.store.filesystem.FilesystemStore`).

    Arguments:
        backend: an obstore store, e.g. ``obstore.store.from_url("s3://bucket/prefix")``.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend: Any = backend

    def __repr__(self) -> str:
        return f"ObjectStore({self.backend!r})"

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ObjectStore:
        """Open ``s3://``, ``gs://``, ``az://`` or ``memory://``; credentials come from the environment or ``options``.

        Raises:
            MissingExtraError: obstore is not installed.
            StoreError: an address or option that obstore does not know.
        """
        try:
            from obstore.store import from_url
        except ImportError as error:
            raise MissingExtraError(
                "object stores need obstore", where=url, fix="pip install 'halfbyte[objectstore]'"
            ) from error
        try:
            return cls(from_url(url, **options))
        except Exception as error:
            raise StoreError(f"cannot open the store: {_first_line(error)}", where=url) from error

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        with self._errors(key):
            result = self.backend.get(check_key(key))
            size = result.meta["size"]
            if limit is not None and size > limit:
                raise StoreError(f"{size} bytes, at most {limit} are accepted", where=f"{self}: {key}")
            return bytes(result.bytes())

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        with self._errors(key):
            size = self.backend.head(check_key(key))["size"]
            end = min(end, size)
            return bytes(self.backend.get_range(key, start=begin, end=end)) if begin < end else b""

    def read_cell(self, key: str) -> Cell | None:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        try:
            with self._errors(key):
                result = self.backend.get(check_key(key))
                tag = result.meta["e_tag"]
                data = bytes(result.bytes())
        except ObjectMissingError:
            return None
        if tag is None:
            raise StoreError("this store gives no ETags, so nothing can be swapped safely", where=f"{self}: {key}")
        return Cell(data, tag)

    def put(self, key: str, data: Buffer) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        with self._errors(key):
            self.backend.put(check_key(key), bytes(data))

    def swap(self, key: str, data: Buffer, expected: str | None) -> str:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        mode: Any = "create" if expected is None else {"e_tag": expected}
        with self._errors(key):
            done = self.backend.put(check_key(key), bytes(data), mode=mode, use_multipart=False)
            return str(done["e_tag"])

    def list(self, prefix: str) -> Iterator[Entry]:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        with self._errors(prefix):
            found = [item for chunk in self.backend.list(check_key(prefix)) for item in chunk]
        entries = [Entry(item["path"], item["size"], item["last_modified"].timestamp()) for item in found]
        return iter(sorted(entries, key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        """See :class:`~halfbyte.refit.store.protocol.Store`."""
        try:
            with self._errors(key):
                self.backend.delete(check_key(key))
        except ObjectMissingError:
            return

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """obstore's errors by name (its classes may not be importable) to ours."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            where, names = f"{self}: {key}", {kind.__name__ for kind in type(error).__mro__}
            if names & {"FileNotFoundError", "NotFoundError"}:
                raise ObjectMissingError("the store has no such key", where=where) from error
            if names & {"AlreadyExistsError", "PreconditionError"}:
                raise StoreConflictError("the cell has changed since it was read", where=where) from error
            if names & {*_FOR_EVER, "NotImplementedError", "TypeError", "ValueError"}:
                raise StoreError(f"refused: {_first_line(error)}", where=where) from error
            raise StoreUnavailableError(f"no answer: {_first_line(error)}", where=where) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
