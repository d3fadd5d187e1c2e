"""From fetched steps to one checked patch: states chained, streams decoded, bytes compared, several versions folded into one.

Nothing here writes to the target. What can be found wrong is found here: a step that does not start from what the target
holds, a digest that does not follow, bytes that do not become what the manifest promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.codec import TensorDelta, block_hashes
from halfbyte.refit.errors import CorruptError, WrongBaseError
from halfbyte.refit.manifest import Manifest, TensorChange
from halfbyte.refit.parallel import each
from halfbyte.refit.state import StateHash
from halfbyte.refit.target import Target

__all__ = ["Names", "Plan", "Step", "advance", "audit", "chain", "target_state"]


@dataclass(frozen=True, eq=False)
class Step:
    """One version's manifest with the entries of its objects: tensor name -> bytes, or the delta read from them."""

    manifest: Manifest
    entries: Mapping[str, Bytes | TensorDelta]


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
    return state.differences(found)


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
    entries: Mapping[str, Bytes | TensorDelta],
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
            delta = (
                data
                if isinstance(data, TensorDelta)
                else TensorDelta.from_bytes(data, where=f"{where}, tensor {name!r}")
            )
            try:
                state.patch(name, delta)
            except RefitError as error:
                first = str(error).split("\n", 1)[0]
                raise WrongBaseError(first, where=where, fix="catch up from a full version") from error
            plans.setdefault(name, Plan(change.info)).deltas.append(delta)
        else:
            if isinstance(data, TensorDelta) or data.size != change.info.bytes:
                raise CorruptError(
                    f"the wrong number of bytes for tensor {name!r}", where=where, expected=f"{change.info.bytes}"
                )
            state.put(change.info, block_hashes(change.info.dtype, data, block))
            plans[name] = Plan(change.info, data)
    return state
