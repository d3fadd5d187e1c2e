"""Old values of the last versions: what skips over several versions are made of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from halfbyte.refit.arrays import Bytes
from halfbyte.refit.patch import BlockPatch, Update, write_block

__all__ = ["History"]


@dataclass(frozen=True)
class _Entry:
    parent: int
    version: int
    blocks: dict[str, tuple[BlockPatch, ...]]
    memory: int


class History:
    """The values that each of the last versions replaced.

    Arguments:
        most: memory for them, bytes; None: as much as the weights of the version last added.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._entries: deque[_Entry] = deque()

    def add(self, update: Update, weights: int) -> None:
        """Remember what ``update`` replaced. Added, removed or re-shaped tensors end what can be skipped.

        Arguments:
            weights: bytes of all tensors.
        """
        if update.source is None or not all(change.in_place for change in update.changes):
            self._entries.clear()
            return
        kept = {
            change.name: tuple(BlockPatch(b.begin, b.positions, b.old, b.old) for b in change.blocks)
            for change in update.changes
        }
        memory = sum(b.memory for blocks in kept.values() for b in blocks)
        self._entries.append(_Entry(update.source.version, update.target.version, kept, memory))
        most = weights if self.most is None else self.most
        while self._entries and sum(entry.memory for entry in self._entries) > most:
            self._entries.popleft()

    def since(self, parent: int) -> set[str] | None:
        """Tensors that changed after version ``parent``; None where memory does not reach back to it."""
        if not any(entry.parent == parent for entry in self._entries):
            return None
        return {name for entry in self._entries if entry.version > parent for name in entry.blocks}

    def content(self, name: str, now: Bytes, parent: int) -> Bytes:
        """A tensor's bytes at version ``parent``, from its bytes ``now``."""
        data = np.array(now)
        for entry in reversed(self._entries):
            if entry.version > parent:
                for block in entry.blocks.get(name, ()):
                    write_block(data, block, "old")
        return data
