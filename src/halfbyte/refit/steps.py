"""The steps of a route while their objects arrive: which tensor is complete, and what has to be done to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.codec import TensorDelta
from halfbyte.refit.errors import CorruptError
from halfbyte.refit.manifest import Manifest, ObjectRef
from halfbyte.refit.objects import read_object
from halfbyte.refit.prepare import Plan, Step

__all__ = ["Steps"]


class Steps:
    """Manifests in order, and the entries that have arrived.

    Arguments:
        manifests: of the steps, the first to be taken first; all checked.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = manifests
        self._entries: list[dict[str, Bytes | TensorDelta]] = [{} for _ in manifests]
        self._changes = [{change.info.name: change for change in m.tensors} for m in manifests]
        self._missing = Counter(c.info.name for m in manifests for c in m.tensors if c.object is not None)

    def objects(self) -> Iterator[ObjectRef]:
        """Objects in the order in which they are needed."""
        for manifest in self.manifests:
            yield from manifest.objects

    def infos(self, held: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The tensors after the last step, from those before the first."""
        infos = dict(held)
        for manifest in self.manifests:
            infos = {} if manifest.kind == "full" else infos
            for change in manifest.tensors:
                infos[change.info.name] = change.info
                if change.operation == "remove":
                    del infos[change.info.name]
        return infos

    def arrived(self, ref: ObjectRef, data: memoryview) -> Iterator[tuple[str, Plan]]:
        """Tensors that an object completes, with all that happens to them.

        Raises:
            RefitError: the object is damaged (its digest was checked: it was written so), or lacks an entry.
        """
        entries = read_object(data, where=f"object {ref.digest}")
        for number, manifest in enumerate(self.manifests):
            places = {n for n, other in enumerate(manifest.objects) if other.digest == ref.digest}
            for change in manifest.tensors if places else ():
                if change.object not in places:
                    continue
                name = change.info.name
                if name not in entries:
                    raise CorruptError(
                        f"no object of the manifest holds tensor {name!r}", where=f"version {manifest.version}"
                    )
                where = f"version {manifest.version}, tensor {name!r}"
                patch = change.operation == "patch"
                self._entries[number][name] = (
                    TensorDelta.from_bytes(entries[name], where=where) if patch else entries[name]
                )
                self._missing[name] -= 1
                if not self._missing[name]:
                    plan = self._plan(name)
                    if plan.info is not None:
                        yield name, plan

    def steps(self) -> list[Step]:
        """All steps, once everything has arrived."""
        return [Step(m, entries) for m, entries in zip(self.manifests, self._entries, strict=True)]

    def _plan(self, name: str) -> Plan:
        plan = Plan(None)
        for manifest, changes, entries in zip(self.manifests, self._changes, self._entries, strict=True):
            if manifest.kind == "full":
                plan = Plan(None)
            change = changes.get(name)
            if change is None:
                continue
            if change.operation == "remove":
                plan = Plan(None)
                continue
            entry = entries[name]
            if isinstance(entry, TensorDelta):
                plan = Plan(change.info, plan.start, [*plan.deltas, entry])
            else:
                plan = Plan(change.info, entry)
        return plan
