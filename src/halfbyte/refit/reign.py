"""A publisher's reign over HEAD: taking a run over, swapping, being fenced.

Every reign has an epoch, one higher than the last. HEAD is changed by compare-and-swap only, so of two publishers one
succeeds; the other reads HEAD again, finds an epoch that is not its own, and stops.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from halfbyte.refit.errors import (
    CorruptError,
    FencedError,
    LayoutError,
    RewoundError,
    StoreConflictError,
    StoreUnavailableError,
)
from halfbyte.refit.head import Catalogue, Edge, Head, is_run_name, read_catalogue, read_head
from halfbyte.refit.keys import HEAD, catalogue_key, manifest_key, object_key
from halfbyte.refit.leases import Lease, drop_lease, write_lease
from halfbyte.refit.store.protocol import Store

__all__ = ["Reign"]

_TRIES = 10


class Reign:
    """HEAD and catalogue of a run, owned until another publisher takes over.

    Arguments:
        store, run: what is taken over.
        read_back: read what was put and compare, before anything names it.
    Raises:
        FencedError: another publisher took the run over at this moment.
        LayoutError: not a run's name, or the store holds another run.
    """

    def __init__(self, store: Store, run: str, *, read_back: bool = True) -> None:
        if not is_run_name(run):
            raise LayoutError(f"{run!r} is not a run's name", expected="letters, digits, dots, dashes, underscores")
        self.store, self.run, self.read_back = store, run, read_back
        self.name = f"publisher-{run}"[:100]
        self._promised: tuple[str, ...] = ()  # keys put that HEAD does not reach yet
        found, owner = read_head(store), f"{socket.gethostname()}:{os.getpid()}"
        tag: str | None = None
        if found is None:
            self.catalogue = Catalogue(run)
            self.promise([catalogue_key(self.catalogue.digest)])
            self._put(catalogue_key(self.catalogue.digest), self.catalogue.to_bytes())
            head = Head(run, 1, 0, None, "", "", self.catalogue.digest, owner)
        else:
            old, tag = found
            if old.run != run:
                raise LayoutError(
                    f"the store holds run {old.run!r}", where=repr(store), expected=repr(run), fix="use one store a run"
                )
            self.catalogue = read_catalogue(store, old)
            head = replace(old, epoch=old.epoch + 1, serial=old.serial + 1, publisher=owner)
        try:
            self._tag = store.swap(HEAD, head.to_bytes(), tag)
        except StoreConflictError as error:
            raise FencedError("another publisher took this run over at the same moment", where=repr(store)) from error
        self.head = head

    def swap(self, edges: Sequence[Edge], **changes: Any) -> None:
        """Add steps to the catalogue and change HEAD, in one step. Garbage collection may change the catalogue meanwhile.

        Raises:
            FencedError: another publisher has taken over.
            StoreConflictError: an earlier swap of ours, given up as lost, came through after all: HEAD has another version.
            StoreUnavailableError: no answer; the swap may have happened (see :meth:`reread`).
        """
        before = self.head.manifest
        for _ in range(_TRIES):
            try:
                self._write(replace(self.head, **changes), self.catalogue.adding(*edges))
                return
            except StoreConflictError as error:
                self.reread(error)
                if self.head.manifest != before:
                    raise StoreConflictError(
                        f"HEAD has moved to version {self.head.version} by a write that was thought lost",
                        where=repr(self.store),
                        fix="publish again",
                    ) from error
        raise StoreUnavailableError("HEAD changes faster than it can be swapped", where=repr(self.store))

    def rewind(self, version: int) -> None:
        """Name an older version, in a new epoch; what came after it leaves the catalogue.

        Raises:
            RewoundError: the catalogue does not hold it.
        """
        self.reread()
        main = self.main_edge(version)
        if main is None:
            held = sorted({edge.version for edge in self.catalogue.edges})
            shown = ", ".join(map(str, held if len(held) < 8 else [*held[:3], "...", *held[-3:]]))
            raise RewoundError(
                f"version {version} is not in the store", where=f"run {self.run!r}", expected=f"one of {shown}"
            )
        kept = self.catalogue.keeping(lambda edge: edge.version <= version)
        epoch = self.head.epoch + 1
        self._write(replace(self.head, epoch=epoch, version=version, state=main.state, manifest=main.manifest), kept)

    def reread(self, cause: Exception | None = None) -> None:
        """HEAD as it is now.

        Raises:
            FencedError: it belongs to another publisher.
        """
        found = read_head(self.store)
        if found is None or (found[0].epoch, found[0].publisher) != (self.head.epoch, self.head.publisher):
            owner = "is gone" if found is None else f"belongs to {found[0].publisher} (epoch {found[0].epoch})"
            raise FencedError(
                f"another publisher has taken over: HEAD of run {self.run!r} {owner}, this publisher has epoch {self.head.epoch}",
                where=repr(self.store),
                fix="stop one of the two trainers; open the publisher again to take the run back",
            ) from cause
        self.head, self._tag = found
        self.catalogue = read_catalogue(self.store, self.head)

    def main_edge(self, version: int) -> Edge | None:
        """The step that a version was published as, before any skips and anchors to it."""
        rank = {"delta": 0, "noop": 0, "skip": 1, "full": 2}
        found = [edge for edge in self.catalogue.edges if edge.version == version]
        return min(found, key=lambda e: (rank[e.kind], -(e.parent or 0)), default=None)

    def anchor_due(self, every: int, chain: float) -> bool:
        """Whether the last full version is ``every`` versions old, or the deltas since are ``chain`` times its size."""
        version, full = self.head.version, [e for e in self.catalogue.edges if e.kind == "full"]
        if version is None or not full:
            return version is not None
        last = max(full, key=lambda e: e.version)
        main = [self.main_edge(v) for v in {e.version for e in self.catalogue.edges if e.version > last.version}]
        size = sum(e.bytes for e in main if e is not None)
        return version > last.version and ((0 < every <= version - last.version) or size > chain * last.bytes)

    def promise(self, keys: Sequence[str]) -> None:
        """Keep keys from garbage collection until HEAD reaches them."""
        self._promised += tuple(keys)
        write_lease(self.store, Lease(self.name, keys=self._promised))

    def kept(self) -> None:
        """HEAD reaches all that was promised (or never will)."""
        self._promised = ()
        drop_lease(self.store, self.name)

    def put_object(self, digest: str, data: bytes) -> None:
        """Put an object under its content hash."""
        self._put(object_key(digest), data)

    def put_manifest(self, digest: str, data: bytes) -> None:
        """Put a manifest under its digest."""
        self._put(manifest_key(digest), data)

    def _put(self, key: str, data: bytes) -> None:
        for _ in range(2):
            self.store.put(key, data)
            if not self.read_back or self.store.get(key) == data:
                return
        raise CorruptError(
            "the store gives back other bytes than were put, twice in a row", where=f"{self.store}: {key}"
        )

    def _write(self, head: Head, catalogue: Catalogue) -> None:
        head = replace(head, serial=self.head.serial + 1, catalogue=catalogue.digest)
        self.promise([catalogue_key(catalogue.digest)])
        self._put(catalogue_key(catalogue.digest), catalogue.to_bytes())
        self._tag = self.store.swap(HEAD, head.to_bytes(), self._tag)
        self.head, self.catalogue = head, catalogue
