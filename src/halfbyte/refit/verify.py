"""A look at all of a store: whether every way to a version that the catalogue lists can be fetched and leads where it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.codec import block_hashes
from halfbyte.refit.errors import CorruptError
from halfbyte.refit.fetch import Fetcher
from halfbyte.refit.head import Edge, Head, read_catalogue, read_head
from halfbyte.refit.keys import MANIFESTS
from halfbyte.refit.manifest import Manifest, Signer
from halfbyte.refit.objects import read_object
from halfbyte.refit.prepare import Step, chain
from halfbyte.refit.route import find_route
from halfbyte.refit.state import StateHash
from halfbyte.refit.store.protocol import ReadStore, Store

__all__ = ["Checked", "StoreReport", "differing_tensors", "verify_store"]


@dataclass(frozen=True)
class Checked:
    """One way to a version: what the catalogue says of it, its manifest where that could be read, and what is wrong ("" for
    nothing)."""

    edge: Edge
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class StoreReport:
    """A store as it was read.

    Arguments:
        head: HEAD; None for an empty store, or one that lost it (``problem`` says so).
        ways: every way, ascending by version.
        state: block hashes of HEAD's version, followed from a full version; None where that fails.
        problem: why HEAD's version cannot be reached ("" if it can).
    """

    head: Head | None
    ways: tuple[Checked, ...] = ()
    state: StateHash | None = None
    problem: str = ""

    @property
    def good(self) -> bool:
        """Nothing is wrong."""
        return not self.problem and not any(way.problem for way in self.ways)


def verify_store(
    store: ReadStore,
    *,
    signer: Signer | None = None,
    objects: bool = True,
    on_way: Callable[[Checked], None] | None = None,
) -> StoreReport:
    """Read HEAD, the catalogue, all manifests and (unless told not to) all objects.

    Objects are held against their content hash, their deltas parsed, and the state hash followed along every way.

    Arguments:
        signer: demand signed manifests.
        on_way: called after each way.
    Raises:
        CorruptError: HEAD or the catalogue themselves cannot be read.
        StoreError: the store does not answer.
    """
    found = read_head(store)
    if found is None:
        lost = isinstance(store, Store) and any(True for _ in store.list(MANIFESTS))
        return StoreReport(None, problem="HEAD is missing, but there are manifests" if lost else "")
    head = found[0]
    catalogue = read_catalogue(store, head)
    fetcher = Fetcher(store, signer=signer)
    states: dict[str, StateHash] = {}
    ways: list[Checked] = []
    for edge in sorted(catalogue.edges, key=lambda e: (e.version, e.parent is not None, e.parent or 0)):
        way = _check(fetcher, edge, head, states, objects=objects)
        ways.append(way)
        if on_way is not None:
            on_way(way)
    if head.version is None:
        return StoreReport(head, tuple(ways))
    try:
        find_route(catalogue, head, None)
    except RefitError as error:
        return StoreReport(head, tuple(ways), None, _first_line(error))
    state = states.get(head.state)
    lost = objects and state is None
    return StoreReport(head, tuple(ways), state, "no way that is whole leads to HEAD" if lost else "")


def differing_tensors(
    state: StateHash, infos: Mapping[str, TensorInfo], read: Callable[[str], Bytes], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Tensor -> how something that should hold ``state`` differs from it.

    Arguments:
        infos, read: what it holds.
        aliases: tied names -> the name that is published.
    """
    found: dict[str, str] = {}
    for name, info in infos.items():
        published = aliases.get(name, name)
        wanted = state.infos.get(published)
        if wanted is None:
            found[name] = "not in the version"
        elif (wanted.dtype, wanted.shape) != (info.dtype, info.shape):
            found[name] = f"{info.dtype} {list(info.shape)}, the version has {wanted.dtype} {list(wanted.shape)}"
        else:
            bad = int((block_hashes(info.dtype, read(name), state.block) != state.hashes(published)).sum())
            if bad:
                found[name] = f"{bad} of {len(state.hashes(published))} blocks differ"
    return found | {name: "missing" for name in state.infos if name not in infos}


def _check(fetcher: Fetcher, edge: Edge, head: Head, states: dict[str, StateHash], *, objects: bool) -> Checked:
    manifest = None
    try:
        manifest = fetcher.manifest(edge.manifest)
        says = (manifest.run, manifest.version, manifest.state, manifest.parent, manifest.kind)
        if says != (head.run, edge.version, edge.state, edge.parent, edge.kind):
            raise CorruptError(f"the manifest is of {says}, the catalogue lists another")
        if objects:
            held = fetcher.objects(manifest.objects)
            entries: dict[str, Bytes] = {}
            for ref in manifest.objects:
                entries |= read_object(held[ref.digest], where=f"object {ref.digest}")
            base = None if edge.parent is None else states.get(edge.base)
            if edge.parent is None or base is not None:
                states[edge.state] = chain(base, [Step(manifest, entries)])[0]
    except RefitError as error:
        return Checked(edge, manifest, _first_line(error))
    return Checked(edge, manifest)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
