"""Leases: what a reader still needs, so that garbage collection leaves it alone.

A lease is a small object that its reader writes again while it works. It lapses when it was not written for ``seconds`` by the
store's own clock: a dead reader holds nothing for ever, and nobody's clock has to be right.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from halfbyte.refit.errors import CorruptError, LayoutError, ObjectMissingError, StoreError
from halfbyte.refit.keys import LEASES, lease_key
from halfbyte.refit.manifest import canonical
from halfbyte.refit.store.protocol import Store, check_key

__all__ = ["LEASE_SECONDS", "Lease", "check_reader", "drop_lease", "read_leases", "write_lease"]

LEASE_SECONDS = 3600.0
_READER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMIT = 1 << 24


@dataclass(frozen=True)
class Lease:
    """What one reader holds.

    Arguments:
        reader: its name.
        manifests: digests of the manifests it is fetching, with all their objects.
        keys: keys that a writer is about to make reachable from HEAD: objects, manifests, a catalogue.
        seconds: how long the lease holds after it was last written.
    """

    reader: str
    manifests: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    seconds: float = LEASE_SECONDS


def check_reader(name: str) -> str:
    """A reader's name.

    Raises:
        LayoutError: not one that can be a key.
    """
    if not _READER.fullmatch(name):
        raise LayoutError(f"{name!r} is not a reader's name", expected="letters, digits, dots, dashes, underscores")
    return name


def write_lease(store: Store, lease: Lease) -> None:
    """Take or renew a lease."""
    table = {"manifests": list(lease.manifests), "keys": list(lease.keys), "seconds": lease.seconds}
    store.put(lease_key(check_reader(lease.reader)), canonical(table))


def drop_lease(store: Store, reader: str) -> None:
    """Give a lease back."""
    store.delete(lease_key(check_reader(reader)))


def read_leases(store: Store, now: float) -> list[Lease]:
    """Leases that hold at ``now`` (the store's clock).

    Raises:
        CorruptError: one that cannot be read: garbage collection must then not go on.
    """
    found = []
    for entry in store.list(LEASES):
        try:
            data = store.get(entry.key, limit=_LIMIT)
        except ObjectMissingError:
            continue  # given back meanwhile
        lease = _parse(entry.key, data)
        if now - entry.modified <= lease.seconds:
            found.append(lease)
    return found


def _parse(key: str, data: bytes) -> Lease:
    try:
        table = json.loads(data)
        seconds = float(table["seconds"])
        manifests, keys = tuple(table["manifests"]), tuple(check_key(key) for key in table["keys"])
        if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in manifests):
            raise ValueError("not digests")
        if not 0 <= seconds < math.inf:
            raise ValueError("not a time")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, StoreError) as error:
        raise CorruptError("not a lease", where=key, fix="delete it, or let its reader write it again") from error
    return Lease(key.rsplit("/", 1)[-1].removesuffix(".json"), manifests, keys, seconds)
