"""Stores: a folder, an object store, an HTTP server (for reading), memory. One small protocol."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from halfbyte.refit.errors import StoreError
from halfbyte.refit.store.filesystem import FilesystemStore
from halfbyte.refit.store.http import HttpStore
from halfbyte.refit.store.memory import MemoryStore
from halfbyte.refit.store.objectstore import ObjectStore
from halfbyte.refit.store.protocol import Cell, Entry, ReadStore, Store, check_key
from halfbyte.refit.store.retry import Retrying

__all__ = [
    "Cell",
    "Entry",
    "FilesystemStore",
    "HttpStore",
    "MemoryStore",
    "ObjectStore",
    "ReadStore",
    "Retrying",
    "Store",
    "check_key",
    "open_store",
]

_BUCKETS = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "memory"}


def open_store(address: str, **options: Any) -> Retrying:
    """A store by its address, with retries: a path or ``file://``, ``http(s)://`` (read only), ``s3://``, ``gs://``, ``az://``.

    Arguments:
        options: passed to the store (credentials, endpoint, ``timeout``, ``headers``).
    Raises:
        StoreError: an address of another kind.
        MissingExtraError: an object store without obstore.
    """
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        return Retrying(HttpStore(address, **options))
    if parts.scheme in _BUCKETS:
        return Retrying(ObjectStore.from_url(address, **options))
    if parts.scheme == "file":
        return Retrying(FilesystemStore(url2pathname(parts.path), **options))
    if "://" in address:
        raise StoreError(
            f"unknown kind of store {parts.scheme!r}",
            where=address,
            expected=f"a path, http, https, {', '.join(sorted(_BUCKETS))}",
        )
    return Retrying(FilesystemStore(address, **options))
