"""Retention and garbage collection: what may be forgotten, without ever taking it from under a reader.

Collection first takes old steps out of the catalogue (a swap of HEAD like any other). Then everything that neither HEAD's
catalogue nor a lease reaches is written down as doomed, and deleted by a later collection if it is still unreachable after the
grace period. A reader that read HEAD before the swap has that long to write its lease; afterwards the lease protects it. All
ages are by the store's own clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from halfbyte.errors import RefitError
from halfbyte.refit.errors import CorruptError, ObjectMissingError, StoreConflictError
from halfbyte.refit.head import Catalogue, Head, read_catalogue, read_head
from halfbyte.refit.keys import (
    CATALOGUES,
    DOOMED,
    GC_CLOCK,
    HEAD,
    MANIFESTS,
    OBJECTS,
    catalogue_key,
    digest_of,
    manifest_key,
    object_key,
)
from halfbyte.refit.leases import Lease, drop_lease, read_leases, write_lease
from halfbyte.refit.manifest import Manifest, canonical
from halfbyte.refit.route import find_route
from halfbyte.refit.store.filesystem import FilesystemStore
from halfbyte.refit.store.protocol import Store

__all__ = ["Collected", "Retention", "collect", "prune"]

_MANIFEST_LIMIT = 1 << 28


@dataclass(frozen=True)
class Retention:
    """What is kept.

    Arguments:
        versions: steps to the last so many versions stay, so that readers no further behind need no full version.
        grace: seconds between finding something unused and deleting it. Longer than a publication takes, and than a reader
            needs from reading HEAD to writing its lease.
    """

    versions: int = 64
    grace: float = 900.0


@dataclass(frozen=True)
class Collected:
    """What a collection did.

    Arguments:
        dropped_steps: taken out of the catalogue.
        doomed: keys that wait for the grace period to end.
        deleted: keys deleted.
        freed_bytes: their size.
        leases: readers whose leases held.
    """

    dropped_steps: int
    doomed: int
    deleted: int
    freed_bytes: int
    leases: tuple[str, ...]


def prune(catalogue: Catalogue, head: Head, versions: int) -> Catalogue:
    """The catalogue with the steps worth keeping.

    Kept: steps between the last ``versions`` versions; the newest full version, and the cheapest way from it to HEAD; the
    newest full version from before those versions, with its way (a rewind within them still finds one).
    """
    if head.version is None:
        return catalogue
    oldest = head.version - versions
    full = [edge for edge in catalogue.edges if edge.kind == "full"]
    anchors = [
        max((e for e in full if e.version <= most), key=lambda e: e.version, default=None)
        for most in (oldest, head.version)
    ]
    keep = {edge.manifest for edge in catalogue.edges if edge.parent is not None and edge.parent >= oldest}
    keep |= {edge.manifest for edge in full if edge.version >= oldest}
    for anchor in anchors:
        if anchor is not None:
            only = catalogue.keeping(lambda e, anchor=anchor: e.parent is not None or e == anchor)  # type: ignore[misc]
            keep |= {edge.manifest for edge in find_route(only, head, None)}
    keep.add(head.manifest)
    return catalogue.keeping(lambda edge: edge.manifest in keep)


def collect(store: Store, retention: Retention | None = None) -> Collected:
    """One collection. Any number may run, next to publishers and readers; one that is killed is simply run again.

    Raises:
        CorruptError: a manifest, lease or catalogue cannot be read: nothing is deleted then.
        StoreError: see the store.
    """
    retention = retention or Retention()
    found = read_head(store)
    if found is None:
        return Collected(0, 0, 0, 0, ())
    dropped = _drop_steps(store, *found, retention.versions)
    store.put(GC_CLOCK, canonical({"serial": found[0].serial}))
    now = max(entry.modified for entry in store.list("gc") if entry.key == GC_CLOCK)
    present = {e.key: e for prefix in (OBJECTS, MANIFESTS, CATALOGUES) for e in store.list(prefix)}
    used, leases = _reachable(store, now)
    doomed = _read_doomed(store)
    unused = {key for key, entry in present.items() if key not in used}
    ripe = {key for key in unused & doomed.keys() if now - max(doomed[key], present[key].modified) >= retention.grace}
    if ripe:  # look again: a lease or a publication may have come meanwhile
        used, leases = _reachable(store, now)
        ripe -= used
    for key in sorted(ripe, key=_order):
        store.delete(key)
    waiting = {key: doomed.get(key, now) for key in unused - ripe - used}
    store.put(DOOMED, canonical(waiting))
    if isinstance(store, FilesystemStore):
        store.sweep()
    return Collected(dropped, len(waiting), len(ripe), sum(present[key].size for key in ripe), leases)


def _drop_steps(store: Store, head: Head, tag: str, versions: int) -> int:
    """Swap in a pruned catalogue; another writer's swap goes before ours, and the next collection tries again."""
    catalogue = read_catalogue(store, head)
    pruned = prune(catalogue, head, versions)
    dropped = len(catalogue.edges) - len(pruned.edges)
    if not dropped:
        return 0
    key, collector = catalogue_key(pruned.digest), f"collector-{pruned.digest[:16]}"
    write_lease(store, Lease(collector, keys=(key,)))
    store.put(key, pruned.to_bytes())
    try:
        store.swap(HEAD, replace(head, serial=head.serial + 1, catalogue=pruned.digest).to_bytes(), tag)
    except StoreConflictError:
        return 0
    finally:
        drop_lease(store, collector)
    return dropped


def _reachable(store: Store, now: float) -> tuple[set[str], tuple[str, ...]]:
    """Keys that HEAD and leases reach. Leases are read first: one given back in between was for what HEAD names by then."""
    leases = read_leases(store, now)
    found = read_head(store)
    if found is None:
        raise CorruptError("HEAD has gone", where=repr(store))
    head = found[0]
    manifests = {edge.manifest for edge in read_catalogue(store, head).edges}
    if head.manifest:
        manifests.add(head.manifest)
    used = {catalogue_key(head.catalogue)}
    for digest in sorted(manifests):
        used |= {manifest_key(digest), *_objects_of(store, digest)}
    for lease in leases:
        used |= set(lease.keys)
        for digest in lease.manifests:
            used.add(manifest_key(digest))
            try:
                used |= set(_objects_of(store, digest))
            except ObjectMissingError:
                continue  # a publisher's lease: not written yet
    return used, tuple(sorted(lease.reader for lease in leases))


def _objects_of(store: Store, digest: str) -> Iterable[str]:
    try:
        manifest = Manifest.from_bytes(store.get(manifest_key(digest), limit=_MANIFEST_LIMIT), digest=digest)
    except ObjectMissingError:
        raise
    except RefitError as error:
        raise CorruptError(
            "a manifest cannot be read, so nothing is deleted", where=f"{store}: {manifest_key(digest)}"
        ) from error
    return [object_key(ref.digest) for ref in manifest.objects]


def _read_doomed(store: Store) -> dict[str, float]:
    """Key -> when it was first found unused."""
    try:
        table = json.loads(store.get(DOOMED))
        found = {str(key): float(value) for key, value in table.items()}
        return {key: value for key, value in found.items() if math.isfinite(value)}
    except (ObjectMissingError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _order(key: str) -> tuple[int, str]:
    """Manifests go before the objects they name, so that a manifest that is there has its objects."""
    return (1 if key.startswith(OBJECTS + "/") else 0), digest_of(key)
