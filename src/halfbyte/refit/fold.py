"""Several versions of a tensor become one patch.

Tensors are folded one by one, as soon as all that concerns them has been fetched, so that decoding goes on while the link is
busy: block by block where the target holds the base (``blockwise``), else on a copy of the tensor, which is compared with what
the target holds. Nothing here writes to the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.blockwise import TensorFold
from halfbyte.refit.codec import apply, block_count, block_hash, block_span
from halfbyte.refit.codec.element import element_of
from halfbyte.refit.errors import CorruptError, LayoutError
from halfbyte.refit.parallel import each
from halfbyte.refit.patch import BlockPatch, Change, Stamp, Update, patch_between
from halfbyte.refit.prepare import Names, Plan
from halfbyte.refit.state import StateHash
from halfbyte.refit.target import Target

__all__ = ["Folding", "Repair", "prepare_update"]


class Repair(Protocol):
    """Gets the content of damaged blocks from the store."""

    def __call__(self, wanted: Mapping[str, Sequence[int]], state: StateHash) -> Mapping[str, Mapping[int, Bytes]]:
        """Blocks of the version whose hashes are ``state``: tensor -> block number -> bytes."""
        ...


@dataclass(eq=False)
class _Folded:
    """A tensor with blocks that nothing fits: its bytes after all deltas, blocks that may differ, damaged ones."""

    name: str
    info: TensorInfo
    data: Bytes
    touched: set[int] | None  # None: any
    damaged: set[int]


class Folding:
    """Collects the changes of one update. Tensors may be folded by several threads.

    Arguments:
        target, names: what the update is for.
        block: elements of a block.
        damaged: blocks known to be damaged: tensor -> block numbers.
    """

    def __init__(
        self, target: Target, names: Names, block: int, damaged: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self.target, self.names, self.block, self.damaged = target, names, block, dict(damaged or {})
        self._done: dict[str, list[Change]] = {}
        self._broken: dict[str, _Folded] = {}

    def work(self, name: str, plan: Plan) -> list[Callable[[], None]]:
        """Calls that fold one published tensor between them, in any order and by any threads; they raise as :meth:`tensor`."""
        held, infos = self.names.held(name), self.target.infos()
        if plan.info is None or plan.start is not None or len(held) != 1 or self.damaged.get(name) or not plan.deltas:
            return [lambda: self.tensor(name, plan)]
        after = TensorInfo(held[0], plan.info.dtype, plan.info.shape)
        shapes = {(delta.dtype, delta.elements, delta.block) for delta in plan.deltas}
        if infos.get(held[0]) != after or shapes != {(after.dtype, after.elements, self.block)}:
            return [lambda: self.tensor(name, plan)]
        where = f"tensor {name!r}"
        fold = TensorFold(after.dtype, lambda: self.target.read(held[0]), plan.deltas, where)

        def part(number: int) -> None:
            if not fold.part(number):
                return
            if fold.damaged:
                self.tensor(name, plan)  # finds out which blocks
                return
            patches = fold.patches()
            self._done[name] = [Change(after, after, patches)] if patches else []

        return [partial(part, number) for number in range(fold.parts)]

    def tensor(self, name: str, plan: Plan) -> None:
        """Fold one published tensor.

        Raises:
            CorruptError, RefitError: a damaged stream, or a delta that does not fit the full version it follows.
            LayoutError: the target does not hold the tensor.
        """
        held = self.names.held(name)
        if plan.info is None:
            infos = self.target.infos()
            self._done[name] = [Change(infos[n], None, old=np.array(self.target.read(n))) for n in held]
            return
        if plan.start is None and not held:
            raise LayoutError(f"the target does not hold tensor {name!r}", expected="it, or a declared tie of it")
        if plan.start is None:
            data = np.array(self.target.read(held[0]))
        else:
            data = np.array(plan.start) if plan.deltas else plan.start
        touched = set(self.damaged.get(name, ()))
        damaged = set(touched)
        for delta in plan.deltas:
            applied = apply(plan.info.dtype, data, delta, where=f"tensor {name!r}")
            touched |= {int(index) for index in np.flatnonzero(delta.table["kind"])}
            damaged |= set(applied.damaged)
        folded = _Folded(name, plan.info, data, None if plan.start is not None else touched, damaged)
        if damaged:
            self._broken[name] = folded
        else:
            self._done[name] = self._compare(folded)

    def update(self, source: Stamp | None, goal: Stamp, state: StateHash, repair: Repair, threads: int) -> Update:
        """The whole update, after every tensor was folded.

        Arguments:
            state: block hashes after the last step. A block that no delta fitted may still have become what it should (a later
                step was applied before); the rest is repaired.
            repair: asked for those.
        Raises:
            CorruptError: a damaged block that cannot be repaired.
        """
        for name in self.damaged.keys() - self._done.keys() - self._broken.keys():
            self.tensor(name, Plan(state.infos[name]))
        wanted: dict[str, list[int]] = {}
        for name, folded in sorted(self._broken.items()):
            hashes = state.hashes(name)
            wrong = sorted(i for i in folded.damaged if block_hash(self._block(folded, i)) != hashes[i])
            if wrong and folded.touched is None:
                raise CorruptError(
                    f"a delta does not fit the full version it follows ({len(wrong)} blocks)", where=f"tensor {name!r}"
                )
            if wrong:
                wanted[name] = wrong
        mended = repair(wanted, state) if wanted else {}
        for name, blocks in mended.items():
            for index, content in blocks.items():
                self._block(self._broken[name], index)[:] = content
        broken = list(self._broken.values())
        self._done |= dict(zip((f.name for f in broken), each(self._compare, broken, threads), strict=True))
        return Update(source, goal, tuple(change for _, changes in sorted(self._done.items()) for change in changes))

    def _compare(self, folded: _Folded) -> list[Change]:
        """Changes of all the target's names for one published tensor."""
        infos, info, data = self.target.infos(), folded.info, folded.data
        unit, count = element_of(info.dtype).size, block_count(info.elements, self.block)
        found = []
        for number, name in enumerate(self.names.held(folded.name) or [folded.name]):
            after, before = TensorInfo(name, info.dtype, info.shape), infos.get(name)
            if before != after:
                old = None if before is None else np.array(self.target.read(name))
                found.append(Change(before, after, old=old, new=data))
                continue
            held = self.target.read(name)
            every = folded.touched is None or number > 0  # a copy of a tie may differ anywhere
            blocks: list[BlockPatch] = []
            for index in range(count) if every else sorted(folded.touched or ()):
                begin, end = block_span(info.dtype, info.elements, index, self.block)
                patch = patch_between(held[begin:end], data[begin:end], unit, begin)
                if patch is not None:
                    blocks.append(patch)
            if blocks:
                found.append(Change(before, after, tuple(blocks)))
        return found

    def _block(self, folded: _Folded, index: int) -> Bytes:
        begin, end = block_span(folded.info.dtype, folded.info.elements, index, self.block)
        return folded.data[begin:end]


def prepare_update(
    target: Target,
    names: Names,
    source: Stamp | None,
    goal: Stamp,
    state: StateHash,
    plans: Mapping[str, Plan],
    repair: Repair,
    *,
    threads: int = 1,
) -> Update:
    """Fold tensors whose plans are all at hand (see :func:`~halfbyte.refit.prepare.chain`)."""
    folding = Folding(target, names, state.block)
    concerned = [(n, plan) for n, plan in sorted(plans.items()) if plan.info is not None or names.held(n)]
    work = [call for name, plan in concerned for call in folding.work(name, plan)]
    each(lambda call: call(), work, threads)
    return folding.update(source, goal, state, repair, threads)
