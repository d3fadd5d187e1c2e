"""Fetching manifests and objects: several at a time, never more than announced, nothing believed before its digest."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from halfbyte.errors import RefitError
from halfbyte.refit.disk import Disk
from halfbyte.refit.errors import CorruptError
from halfbyte.refit.head import Edge, Head
from halfbyte.refit.keys import manifest_key, object_key
from halfbyte.refit.manifest import Manifest, ObjectRef, Signer
from halfbyte.refit.parallel import each, worker_threads
from halfbyte.refit.store.protocol import ReadStore

__all__ = ["Fetcher"]

_MANIFEST_LIMIT = 1 << 28
_MANIFESTS_KEPT = 64


class Fetcher:
    """Reads one store.

    Arguments:
        store: where from.
        signer: demand signed manifests.
        cache: folder that keeps fetched objects until :meth:`forget`, so that a killed subscriber does not fetch them again;
            None keeps them in memory.
        disk: file operations of the cache.
        threads: requests at a time.
    """

    def __init__(
        self,
        store: ReadStore,
        *,
        signer: Signer | None = None,
        cache: Path | None = None,
        disk: Disk | None = None,
        threads: int | None = None,
    ) -> None:
        self.store, self.signer, self.cache, self.disk = store, signer, cache, disk or Disk()
        self.threads = threads or worker_threads()
        self.fetched_bytes = 0
        self.progress: Callable[[], None] = lambda: None  # called after every object, e.g. to renew a lease
        self._manifests: dict[str, Manifest] = {}
        self._lock = threading.Lock()

    def manifest(self, digest: str) -> Manifest:
        """A manifest by digest; fetched again once where its bytes are damaged.

        Raises:
            CorruptError, RefitError: not the manifest of that digest, or not signed by the key.
            ObjectMissingError, StoreUnavailableError: see the store.
        """
        with self._lock:
            if digest in self._manifests:
                return self._manifests[digest]
        key = manifest_key(digest)
        where = f"{self.store}: {key}"
        data = self._get(key, _MANIFEST_LIMIT)
        try:
            found = Manifest.from_bytes(data, digest=digest, signer=self.signer, where=where)
        except RefitError:
            again = self._get(key, _MANIFEST_LIMIT)
            if again == data:
                raise
            found = Manifest.from_bytes(again, digest=digest, signer=self.signer, where=where)
        with self._lock:
            if len(self._manifests) >= _MANIFESTS_KEPT:
                self._manifests.clear()
            self._manifests[digest] = found
        return found

    def steps(self, route: Sequence[Edge], head: Head) -> list[Manifest]:
        """The manifests of a route, each held against its entry in the catalogue, and HEAD's own against HEAD.

        Returns:
            One manifest an edge, then HEAD's (the last edge's again where that is the same).
        Raises:
            CorruptError: a manifest says something else than the catalogue or HEAD.
        """
        digests = [*(edge.manifest for edge in route), head.manifest]
        found = dict(zip(digests, each(self.manifest, digests, self.threads), strict=True))
        for edge in route:
            m = found[edge.manifest]
            says = (m.run, m.version, m.state, m.parent, m.kind)
            listed = (head.run, edge.version, edge.state, edge.parent, edge.kind)
            if says != listed or m.epoch > head.epoch:
                raise CorruptError(
                    f"the manifest is of {says}, the catalogue lists {listed}",
                    where=f"{self.store}: {manifest_key(edge.manifest)}",
                )
        own = found[head.manifest]
        if (own.run, own.version, own.state) != (head.run, head.version, head.state) or own.epoch > head.epoch:
            raise CorruptError(
                f"HEAD names version {head.version}, its manifest is of version {own.version} of {own.run!r}",
                where=f"{self.store}: {manifest_key(head.manifest)}",
            )
        return [found[digest] for digest in digests]

    def objects(self, refs: Iterable[ObjectRef]) -> dict[str, memoryview]:
        """Objects by digest, each checked.

        Raises:
            CorruptError: an object whose content is not its name, twice in a row.
            ObjectMissingError, StoreUnavailableError: see the store.
        """
        return {ref.digest: data for ref, data in self.stream(refs)}

    def stream(self, refs: Iterable[ObjectRef]) -> Iterator[tuple[ObjectRef, memoryview]]:
        """Objects in the order asked for, each as soon as it and those before it are there. Raises as :meth:`objects`."""
        wanted = list({ref.digest: ref for ref in refs}.values())
        pool = ThreadPoolExecutor(self.threads)
        try:
            for ref, data in zip(wanted, pool.map(self._object, wanted), strict=True):
                self.progress()
                yield ref, memoryview(data)
        finally:
            pool.shutdown(cancel_futures=True)

    def forget(self) -> None:
        """Empty the cache."""
        if self.cache is not None and self.cache.exists():
            for path in sorted(self.cache.iterdir()):
                self.disk.remove(path)

    def _object(self, ref: ObjectRef) -> bytes | mmap.mmap:
        if self.cache is None:
            return self._checked(ref)
        path = self.cache / ref.digest
        kept = _mapped(path)
        if kept is not None and _matches(kept, ref):
            return kept
        data = self._checked(ref)
        self.disk.make_folders(self.cache)
        self.disk.publish(path, [data])
        return _mapped(path) or data

    def _checked(self, ref: ObjectRef) -> bytes:
        for _ in range(2):
            data = self._get(object_key(ref.digest), ref.size)
            if _matches(data, ref):
                return data
        raise CorruptError(
            f"the object's content is not what its name says ({len(data)} bytes)",
            where=f"{self.store}: {object_key(ref.digest)}",
            expected=f"{ref.size} bytes of that SHA-256",
            fix="repair the store, or let the publisher write a full version",
        )

    def _get(self, key: str, limit: int) -> bytes:
        data = self.store.get(key, limit=limit)
        with self._lock:
            self.fetched_bytes += len(data)
        return data


def _matches(data: bytes | mmap.mmap, ref: ObjectRef) -> bool:
    return len(data) == ref.size and hashlib.sha256(data).hexdigest() == ref.digest


def _mapped(path: Path) -> mmap.mmap | None:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # ValueError: an empty file
        return None
