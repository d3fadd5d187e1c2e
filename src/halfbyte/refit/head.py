"""HEAD and the catalogue: which version is current, and by which steps one gets there.

``HEAD`` is the only thing in a store that changes. It names the current version and a catalogue, which lists every step (edge)
that can still be fetched: full versions, deltas, skips over several versions. HEAD is swapped in one step, so a reader sees the
old pair or the new pair. Both are untrusted JSON: they choose what is fetched, and everything fetched is checked by itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from halfbyte.refit.errors import CorruptError
from halfbyte.refit.keys import HEAD, catalogue_key
from halfbyte.refit.manifest import canonical
from halfbyte.refit.patch import Stamp
from halfbyte.refit.store.protocol import ReadStore

__all__ = ["Catalogue", "Edge", "Head", "is_run_name", "read_catalogue", "read_head"]

FORMAT = "halfbyte-refit/1"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HEAD_LIMIT, _CATALOGUE_LIMIT = 1 << 16, 1 << 26
_KINDS = ("full", "delta", "noop", "skip")


@dataclass(frozen=True)
class Head:
    """The current state of a run.

    Arguments:
        run: the run's name.
        epoch: reign of the publisher that owns HEAD; the next owner adds one. Whoever holds a lower one is fenced.
        serial: grows by one with every swap, so that contents never recur.
        version: current weight version; None before the first.
        state: its state digest ("" before the first).
        manifest: digest of its manifest ("" before the first).
        catalogue: digest of the catalogue.
        publisher: who owns HEAD, for messages.
    """

    run: str
    epoch: int
    serial: int
    version: int | None
    state: str
    manifest: str
    catalogue: str
    publisher: str

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str = HEAD) -> Head:
        """Strict reading of untrusted bytes.

        Raises:
            CorruptError: anything else than what :meth:`to_bytes` writes.
        """
        value = _object(data, where, cls)
        good = (
            _name(value["run"])
            and _natural(value["epoch"])
            and _natural(value["serial"])
            and (value["version"] is None or _natural(value["version"]))
            and _digest(value["catalogue"])
            and isinstance(value["publisher"], str)
            and all(
                _digest(value[key]) if value["version"] is not None else value[key] == ""
                for key in ("state", "manifest")
            )
        )
        if not good:
            raise CorruptError("not a HEAD of a refit store", where=where)
        return cls(**value)

    @property
    def stamp(self) -> Stamp | None:
        """The current version; None before the first."""
        return None if self.version is None else Stamp(self.run, self.version, self.state)

    def order(self) -> tuple[int, int]:
        """What never goes down for a reader: (epoch, version)."""
        return self.epoch, -1 if self.version is None else self.version


@dataclass(frozen=True)
class Edge:
    """One step that can be fetched.

    Arguments:
        version: where it leads.
        state: state digest there.
        parent: version it starts from; None for a full version.
        base: state digest it starts from; "" for a full version.
        kind: ``full``, ``delta``, ``noop`` or ``skip``.
        bytes: what fetching it costs, manifest and objects.
        manifest: its manifest's digest.
    """

    version: int
    state: str
    parent: int | None
    base: str
    kind: str
    bytes: int
    manifest: str


@dataclass(frozen=True)
class Catalogue:
    """All steps of a run that can be fetched, ascending by version.

    Arguments:
        run: the run's name.
        edges: the steps.
    """

    run: str
    edges: tuple[Edge, ...] = ()

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical({"format": FORMAT, "run": self.run, "edges": [asdict(edge) for edge in self.edges]})

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "catalogue") -> Catalogue:
        """Strict reading of untrusted bytes.

        Raises:
            CorruptError: anything else than what :meth:`to_bytes` writes.
        """
        value = _object(data, where, cls)
        if not _name(value["run"]) or not isinstance(value["edges"], list):
            raise CorruptError("not a catalogue of a refit store", where=where)
        return cls(value["run"], tuple(_edge(item, where) for item in value["edges"]))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def adding(self, *edges: Edge) -> Catalogue:
        """With more steps; a step that is already there is not added twice."""
        merged = {edge.manifest: edge for edge in (*self.edges, *edges)}
        return replace(
            self, edges=tuple(sorted(merged.values(), key=lambda e: (e.version, e.parent or -1, e.manifest)))
        )

    def keeping(self, wanted: Callable[[Edge], bool]) -> Catalogue:
        """Only the steps that ``wanted`` says."""
        return replace(self, edges=tuple(edge for edge in self.edges if wanted(edge)))


def read_head(store: ReadStore) -> tuple[Head, str] | None:
    """HEAD and the tag to swap it with; None for an empty store.

    Raises:
        CorruptError: a HEAD that is none.
        StoreError: see the store.
    """
    cell = store.read_cell(HEAD)
    return None if cell is None else (Head.from_bytes(cell.data, f"{store}: {HEAD}"), cell.tag)


def read_catalogue(store: ReadStore, head: Head) -> Catalogue:
    """The catalogue that HEAD names.

    Raises:
        CorruptError: its bytes do not have their digest, or are no catalogue of this run.
        ObjectMissingError: garbage collection took it because HEAD moved on; read HEAD again.
    """
    key = catalogue_key(head.catalogue)
    where = f"{store}: {key}"
    data = store.get(key, limit=_CATALOGUE_LIMIT)
    if hashlib.sha256(data).hexdigest() != head.catalogue:
        raise CorruptError("the catalogue does not have the digest that HEAD gives", where=where)
    catalogue = Catalogue.from_bytes(data, where)
    if catalogue.run != head.run:
        raise CorruptError(f"the catalogue is of run {catalogue.run!r}, HEAD of {head.run!r}", where=where)
    return catalogue


def is_run_name(text: str) -> bool:
    """Whether a run may have this name."""
    return _name(text)


def _object(data: bytes, where: str, kind: type) -> dict[str, Any]:
    """The JSON object with exactly the fields of ``kind``."""
    if len(data) > _CATALOGUE_LIMIT:
        raise CorruptError(f"{len(data)} bytes of JSON", where=where)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not JSON: {error}", where=where) from error
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise CorruptError("not of the format " + FORMAT, where=where, fix="is this a halfbyte refit store?")
    if value.keys() != {field.name for field in fields(kind)}:
        raise CorruptError(f"unexpected keys {sorted(value)}", where=where)
    return value


def _edge(value: Any, where: str) -> Edge:
    if not isinstance(value, dict) or value.keys() != {field.name for field in fields(Edge)}:
        raise CorruptError("a step of the catalogue has other keys", where=where)
    full = value["kind"] == "full"
    good = (
        _natural(value["version"])
        and _digest(value["state"])
        and _digest(value["manifest"])
        and _natural(value["bytes"])
        and value["kind"] in _KINDS
        and (value["parent"] is None and value["base"] == "" if full else _digest(value["base"]))
        and (full or (_natural(value["parent"]) and value["parent"] < value["version"]))
    )
    if not good:
        raise CorruptError("a step of the catalogue makes no sense", where=where)
    return Edge(**value)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None
