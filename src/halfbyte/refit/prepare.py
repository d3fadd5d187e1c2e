"""From fetched steps to one checked patch: states chained, streams decoded, bytes compared, several versions folded into one.

Nothing here writes to the target. What can be found wrong is found here: a step that does not start from what the target
holds, a digest that does not follow, bytes that do not become what the manifest promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.codec import TensorDelta, apply, block_hash, block_hashes, block_span
from halfbyte.refit.codec.element import element_of
from halfbyte.refit.errors import CorruptError, LayoutError, WrongBaseError
from halfbyte.refit.manifest import Manifest, TensorChange
from halfbyte.refit.parallel import each
from halfbyte.refit.patch import BlockPatch, Change, Stamp, Update, patch_between
from halfbyte.refit.state import StateHash
from halfbyte.refit.target import Target

__all__ = ["Names", "Plan", "Repair", "Step", "advance", "audit", "chain", "prepare_update", "target_state"]


class Repair(Protocol):
    """Gets the content of damaged blocks from the store."""

    def __call__(self, wanted: Mapping[str, Sequence[int]], state: StateHash) -> Mapping[str, Mapping[int, Bytes]]:
        """Blocks of the version whose hashes are ``state``: tensor -> block number -> bytes."""
        ...


@dataclass(frozen=True, eq=False)
class Step:
    """One version's manifest with the entries of its objects: tensor name -> bytes."""

    manifest: Manifest
    entries: Mapping[str, Bytes]


class Names:
    """Published names and the target's own: a tie may be held once, under any of its names, or as copies.

    Arguments:
        infos: the target's tensors.
        aliases: tied name -> published name, as the manifest declares.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], aliases: Mapping[str, str]) -> None:
        self._held: dict[str, list[str]] = {}
        for name in infos:
            self._held.setdefault(aliases.get(name, name), []).append(name)
        for names in self._held.values():
            names.sort(key=lambda n: n in aliases)  # the published name itself first

    def held(self, published: str) -> list[str]:
        """The target's names for a published tensor; none where it does not hold it."""
        return self._held.get(published, [])

    def published(self) -> list[str]:
        """All published names that the target holds."""
        return list(self._held)


def target_state(target: Target, names: Names, block: int, threads: int = 1) -> StateHash:
    """The state hash of what the target holds, by reading all of it."""
    infos, state = target.infos(), StateHash(block)

    def hashes(published: str) -> np.ndarray:
        name = names.held(published)[0]
        return block_hashes(infos[name].dtype, target.read(name), block)

    published = names.published()
    for name, found in zip(published, each(hashes, published, threads), strict=True):
        info = infos[names.held(name)[0]]
        state.put(TensorInfo(name, info.dtype, info.shape), found)
    return state


def audit(target: Target, names: Names, state: StateHash, threads: int = 1) -> dict[str, tuple[int, ...]]:
    """Blocks whose bytes are not those of ``state``: tensor -> block numbers (all of them where the layout differs)."""
    found = target_state(target, names, state.block, threads)
    return {name: blocks for name, blocks in state.differences(found).items()}


@dataclass
class Plan:
    """What becomes of one published tensor: bytes to start from (None: the target's), then deltas in order."""

    info: TensorInfo | None
    start: Bytes | None = None
    deltas: list[TensorDelta] = field(default_factory=list)


def chain(held: StateHash | None, steps: Sequence[Step]) -> tuple[StateHash, dict[str, Plan]]:
    """Follow the state hash through all steps without reading a weight, and collect what happens to each tensor.

    Arguments:
        held: what the target holds; None where the first step is a full version.
    Raises:
        WrongBaseError: a step does not start from the state before it.
        CorruptError: a step does not lead to the state that its manifest promises, or an entry is missing or damaged.
    """
    plans: dict[str, Plan] = {}
    state = held
    for step in steps:
        m = step.manifest
        where = f"version {m.version}"
        state = advance(state, m.kind == "full", m.block, m.tensors, step.entries, plans, where)
        if state.schema() != m.schema or state.digest() != m.state:
            raise CorruptError("the steps do not lead to the state that the manifest promises", where=where)
    if state is None:
        raise WrongBaseError("no step says what the tensors are")
    return state, plans


def advance(
    held: StateHash | None,
    full: bool,
    block: int,
    tensors: Sequence[TensorChange],
    entries: Mapping[str, Bytes],
    plans: dict[str, Plan],
    where: str,
) -> StateHash:
    """The state after one step; ``plans`` are brought up to date. Arguments and errors as in :func:`chain`."""
    if full:
        plans |= {name: Plan(None) for name in (held.infos if held is not None else ())}
        state = StateHash(block)
    elif held is None or held.block != block:
        raise WrongBaseError("a delta without the version it starts from", where=where)
    else:
        state = held.copy()
    for change in tensors:
        name = change.info.name
        if change.operation == "remove":
            if name not in state.infos:
                raise WrongBaseError(f"tensor {name!r} is removed and was never there", where=where)
            state.remove(name)
            plans[name] = Plan(None)
            continue
        data = entries.get(name)
        if data is None:
            raise CorruptError(f"no object of the manifest holds tensor {name!r}", where=where)
        if change.operation == "patch":
            delta = TensorDelta.from_bytes(data, where=f"{where}, tensor {name!r}")
            try:
                state.patch(name, delta)
            except RefitError as error:
                first = str(error).split("\n", 1)[0]
                raise WrongBaseError(first, where=where, fix="catch up from a full version") from error
            plans.setdefault(name, Plan(change.info)).deltas.append(delta)
        else:
            if data.size != change.info.bytes:
                raise CorruptError(
                    f"{data.size} bytes for tensor {name!r}", where=where, expected=f"{change.info.bytes}"
                )
            state.put(change.info, block_hashes(change.info.dtype, data, block))
            plans[name] = Plan(change.info, data)
    return state


def prepare_update(
    target: Target,
    names: Names,
    source: Stamp | None,
    goal: Stamp,
    state: StateHash,
    plans: Mapping[str, Plan],
    repair: Repair,
    *,
    damaged: Mapping[str, Sequence[int]] | None = None,
    threads: int = 1,
) -> Update:
    """Decode everything against the target's bytes and fold it into one patch.

    Arguments:
        state: block hashes after the last step; every block that is written is compared with them here.
        plans: from :func:`chain`.
        repair: asked for blocks that are neither what a delta starts from nor what it leads to.
        damaged: blocks already known to be damaged, of tensors that the steps may not touch.
    Raises:
        WrongBaseError, CorruptError: and nothing was written.
        LayoutError: the target's tensors are not the store's.
    """
    plans = dict(plans)
    for name, _ in (damaged or {}).items():
        plans.setdefault(name, Plan(state.infos[name]))
    work = [(name, plan) for name, plan in sorted(plans.items()) if plan.info is not None or names.held(name)]
    ready = each(lambda item: _fold(target, names, state, *item, set((damaged or {}).get(item[0], ()))), work, threads)
    broken = {item.name: sorted(item.damaged) for item in ready if item.damaged}
    mended = repair(broken, state) if broken else {}
    found = each(lambda item: _compare(target, names, state, item, mended.get(item.name, {})), ready, threads)
    return Update(source, goal, tuple(change for changes in found for change in changes))


@dataclass
class _Folded:
    name: str
    info: TensorInfo | None
    data: Bytes | None
    touched: set[int] | None  # block numbers that may differ from the target; None: any
    damaged: set[int]


def _fold(target: Target, names: Names, state: StateHash, name: str, plan: Plan, damaged: set[int]) -> _Folded:
    """The tensor's bytes after all deltas, in a copy; blocks that no delta fits are named."""
    if plan.info is None:
        return _Folded(name, None, None, None, set())
    if plan.start is None and not names.held(name):
        raise LayoutError(f"the target does not hold tensor {name!r}", expected="it, or a declared tie of it")
    if plan.start is not None:
        data = np.array(plan.start) if plan.deltas else plan.start
    else:
        data = np.array(target.read(names.held(name)[0]))
    touched: set[int] = set(damaged)
    bad = set(damaged)
    for delta in plan.deltas:
        done = apply(plan.info.dtype, data, delta, where=f"tensor {name!r}")
        touched |= {int(i) for i in np.flatnonzero(delta.table["kind"])}
        bad |= set(done.damaged)
    # A block that was damaged for one delta may still end as it should (a half-applied later step): hashes decide.
    hashes = state.hashes(name)
    dtype, elements = plan.info.dtype, plan.info.elements
    bad = {i for i in bad if block_hash(_block(data, dtype, elements, i, state.block)) != hashes[i]}
    if plan.start is not None and bad:
        raise CorruptError(
            f"a delta does not fit the full version it follows ({len(bad)} blocks)", where=f"tensor {name!r}"
        )
    return _Folded(name, plan.info, data, None if plan.start is not None else touched, bad)


def _compare(
    target: Target, names: Names, state: StateHash, item: _Folded, mended: Mapping[int, Bytes]
) -> list[Change]:
    """Changes of all the target's names for one published tensor."""
    infos = target.infos()
    if item.info is None:
        return [Change(infos[name], None, old=np.array(target.read(name))) for name in names.held(item.name)]
    data = item.data
    assert data is not None
    elements, dtype = item.info.elements, item.info.dtype
    for index, content in mended.items():
        _block(data, dtype, elements, index, state.block)[:] = content
    found = []
    for number, name in enumerate(names.held(item.name) or [item.name]):
        after, before = TensorInfo(name, dtype, item.info.shape), infos.get(name)
        if before != after:
            old = None if before is None else np.array(target.read(name))
            found.append(Change(before, after, old=old, new=data))
            continue
        held = target.read(name)
        count = len(state.hashes(item.name))
        every = item.touched is None or number > 0  # a copy of a tie may differ anywhere
        blocks: list[BlockPatch] = []
        for index in range(count) if every else sorted(item.touched or ()):
            begin, end = block_span(dtype, elements, index, state.block)
            patch = patch_between(held[begin:end], data[begin:end], element_of(dtype).size, begin)
            if patch is not None:
                blocks.append(patch)
        if blocks:
            found.append(Change(before, after, tuple(blocks)))
    return found


def _block(data: Bytes, dtype: str, elements: int, index: int, block: int) -> Bytes:
    begin, end = block_span(dtype, elements, index, block)
    return data[begin:end]
