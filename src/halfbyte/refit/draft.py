"""A draft: a version as bytes, before HEAD names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halfbyte.refit.arrays import Bytes, TensorInfo, flat_bytes
from halfbyte.refit.codec import Profile, encode
from halfbyte.refit.errors import LayoutError
from halfbyte.refit.head import Edge
from halfbyte.refit.manifest import Manifest, Signer, TensorChange
from halfbyte.refit.objects import content_hash, read_object, write_object
from halfbyte.refit.parallel import each
from halfbyte.refit.state import StateHash

__all__ = ["Draft", "Row", "changed_rows", "delta_row", "pack", "whole_rows"]

#: A version has some objects, so that a reader decodes one while it fetches the next; but no tiny ones.
_OBJECTS, _SMALL_OBJECT = 16, 1 << 20
#: A tensor's row and its bytes in an object. The object's number is filled in by :func:`pack`.
Row = tuple[TensorChange, Any]


@dataclass(frozen=True, eq=False)
class Draft:
    """A manifest with the objects it names: digest -> bytes."""

    manifest: Manifest
    data: bytes
    objects: Mapping[str, bytes]

    @classmethod
    def of(cls, manifest: Manifest, objects: Mapping[str, bytes], signer: Signer | None) -> Draft:
        """With the manifest's bytes."""
        return cls(manifest, manifest.to_bytes(signer), objects)

    @property
    def n_bytes(self) -> int:
        """What fetching it costs."""
        return len(self.data) + sum(len(data) for data in self.objects.values())

    @staticmethod
    def entries_of(objects: Mapping[str, bytes]) -> dict[str, Bytes]:
        """Tensor name -> its bytes, read from objects as a subscriber reads them."""
        return {name: data for packed in objects.values() for name, data in read_object(packed).items()}

    def edge(self, base: str) -> Edge:
        """Its entry in the catalogue; ``base`` is the state digest of the parent."""
        m = self.manifest
        return Edge(m.version, m.state, m.parent, "" if m.parent is None else base, m.kind, self.n_bytes, m.digest())


def changed_rows(
    state: StateHash,
    read: Callable[[str], Bytes],
    arrays: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    profile: Profile,
    threads: int,
) -> list[Row]:
    """What differs from a baseline, encoded in parallel, in name order; tensors that are gone at the end.

    Arguments:
        state: block hashes of the baseline.
        read: name -> bytes of the baseline.
        arrays, infos: the weights now.
    Raises:
        LayoutError: an array that is not as long as its info says.
    """

    def change(name: str) -> Row | None:
        info, data, before = infos[name], flat_bytes(arrays[name]), state.infos.get(name)
        if data.size != info.bytes:
            raise LayoutError(f"{data.size} bytes for {info}", where=f"tensor {name!r}", expected=f"{info.bytes}")
        if before != info:
            return TensorChange(info, "add" if before is None else "replace", 0, info.elements), data
        delta = encode(info.dtype, read(name), data, profile, block=state.block, base_hashes=state.hashes(name))
        return None if delta.is_noop else (TensorChange(info, "patch", 0, delta.changed), delta.to_bytes())

    rows = [row for row in each(change, sorted(infos), threads) if row is not None]
    return rows + [(TensorChange(i, "remove", None), b"") for n, i in sorted(state.infos.items()) if n not in infos]


def delta_row(info: TensorInfo, then: Bytes, now: Bytes, profile: Profile, block: int) -> Row | None:
    """The change of one tensor; None where no bit differs."""
    delta = encode(info.dtype, then, now, profile, block=block)
    return None if delta.is_noop else (TensorChange(info, "patch", 0, delta.changed), delta.to_bytes())


def whole_rows(infos: Mapping[str, TensorInfo], data: Callable[[str], Bytes]) -> list[Row]:
    """All tensors as they are, in name order."""
    return [(TensorChange(infos[name], "add", 0, infos[name].elements), data(name)) for name in sorted(infos)]


def pack(
    rows: Sequence[Row], most: int, metadata: Mapping[str, str]
) -> tuple[dict[str, bytes], tuple[TensorChange, ...]]:
    """Objects of about ``most`` bytes (digest -> bytes), and the rows in name order with their object's number.

    Many small tensors share an object: 18,000 experts cost a few requests.
    """
    objects: dict[str, bytes] = {}
    changes = [change for change, _ in rows if change.object is None]
    held = [row for row in rows if row[0].object is not None]
    most = min(most, max(_SMALL_OBJECT, sum(memoryview(data).nbytes for _, data in held) // _OBJECTS))
    for group in _groups(held, most):
        data = write_object({change.info.name: part for change, part in group}, metadata)
        changes += [replace(change, object=len(objects)) for change, _ in group]
        objects[content_hash(data)] = data
    return objects, tuple(sorted(changes, key=lambda change: change.info.name))


def _groups(rows: Sequence[Row], most: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    size = 0
    for change, data in rows:
        n_bytes = memoryview(data).nbytes
        if group and size + n_bytes > most:
            yield group
            group, size = [], 0
        group.append((change, data))
        size += n_bytes
    if group:
        yield group
