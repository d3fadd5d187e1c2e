"""Where things lie in a store."""

from __future__ import annotations

__all__ = ["CATALOGUES", "DOOMED", "GC_CLOCK", "HEAD", "LEASES", "MANIFESTS", "OBJECTS"]
__all__ += ["catalogue_key", "digest_of", "lease_key", "manifest_key", "object_key"]

HEAD = "HEAD"
OBJECTS, MANIFESTS, CATALOGUES, LEASES = "objects", "manifests", "catalogues", "leases"
#: What garbage collection found unused and will delete when it still is, after the grace period.
DOOMED = "gc/doomed.json"
#: Written at the start of every collection: its time is "now" by the store's clock.
GC_CLOCK = "gc/clock"


def object_key(digest: str) -> str:
    """An object by its content hash."""
    return f"{OBJECTS}/{digest}.safetensors"


def manifest_key(digest: str) -> str:
    """A manifest by its digest."""
    return f"{MANIFESTS}/{digest}.json"


def catalogue_key(digest: str) -> str:
    """A catalogue by its digest."""
    return f"{CATALOGUES}/{digest}.json"


def lease_key(reader: str) -> str:
    """A reader's lease."""
    return f"{LEASES}/{reader}.json"


def digest_of(key: str) -> str:
    """The digest in a key of an object, manifest or catalogue."""
    return key.rsplit("/", 1)[-1].split(".", 1)[0]
