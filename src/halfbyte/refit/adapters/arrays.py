"""Arrays in memory as a target: numpy arrays, memory maps, tensors; patched in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np

from halfbyte.refit.arrays import Bytes, TensorInfo, flat_bytes, info_of, writable_bytes
from halfbyte.refit.errors import LayoutError, TargetError
from halfbyte.refit.parallel import each, worker_threads
from halfbyte.refit.patch import Change, Side, Stamp, Update, write_block

__all__ = ["ArraysTarget", "Hooks"]


class Hooks:
    """What an engine does around a commit; override what it needs. By default nothing."""

    def pause(self) -> None:
        """Stop drawing tokens."""

    def resume(self) -> None:
        """Draw tokens again."""

    def invalidate_prefixes(self, stamp: Stamp | None) -> None:
        """Weights are now those of ``stamp``: drop prefix caches of other weights, and stamp tokens with it."""


class ArraysTarget:
    """A mapping of names to arrays, changed in place under the patch's own log.

    Added, removed and re-shaped tensors need ``make`` and a mapping that can be changed; a fixed set of parameters
    refuses them.

    Arguments:
        arrays: name -> contiguous writable array. Shared memory must appear under one name only (see ``refit.ties``).
        infos: dtype and shape by name where an array does not tell (packed codes); default: from the arrays.
        stamp: what the arrays hold, where that is known.
        hooks: pause, resume and prefix invalidation of the engine around them.
        make: (info, bytes) -> array for tensors that are added or re-shaped; None refuses such updates.
        survives: see :class:`~halfbyte.refit.target.Target`.
    """

    def __init__(
        self,
        arrays: MutableMapping[str, Any],
        *,
        infos: Mapping[str, TensorInfo] | None = None,
        stamp: Stamp | None = None,
        hooks: Hooks | None = None,
        make: Callable[[TensorInfo, Bytes], Any] | None = None,
        survives: bool = False,
    ) -> None:
        self.arrays, self.hooks, self.make, self.survives = arrays, hooks or Hooks(), make, survives
        self._infos = dict(infos) if infos is not None else {n: info_of(n, a) for n, a in arrays.items()}
        self._stamp = stamp
        self.threads = worker_threads()
        self._built: dict[str, Any] = {}  # staged arrays of tensors that are added or re-shaped
        self._removed: dict[str, Any] = {}  # arrays that a commit replaced, for the way back

    def infos(self) -> Mapping[str, TensorInfo]:
        """See :class:`~halfbyte.refit.target.Target`."""
        return self._infos

    def stamp(self) -> Stamp | None:
        """See :class:`~halfbyte.refit.target.Target`."""
        return self._stamp

    def read(self, name: str) -> Bytes:
        """See :class:`~halfbyte.refit.target.Target`."""
        return flat_bytes(self.arrays[name])

    def stage(self, update: Update) -> None:
        """Check that everything can be written, and build new arrays; see :class:`~halfbyte.refit.target.Target`."""
        for change in update.changes:
            if change.before != self._infos.get(change.name):
                raise LayoutError("the update starts from another dtype or shape", where=f"tensor {change.name!r}")
            if change.in_place:
                writable_bytes(self.arrays[change.name])
            elif self.make is None:
                raise LayoutError(
                    "tensors are added, removed or re-shaped, and this target has a fixed set",
                    where=f"tensor {change.name!r}",
                    fix="build the engine again from the new version",
                )
            elif change.after is not None and change.new is not None:
                self._built[change.name] = self.make(change.after, change.new)

    def pause(self) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        self.hooks.pause()

    def commit(self, update: Update) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        each(
            lambda change: self._write(change, "new", checked=True),
            [c for c in update.changes if c.in_place],
            self.threads,
        )
        for change in update.changes:
            if not change.in_place:
                self._exchange(change)
        self._stamp = update.target

    def rollback(self, update: Update) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        each(lambda change: self._write(change, "old"), [c for c in update.changes if c.in_place], self.threads)
        for change in update.changes:
            if change.in_place:
                continue
            if change.before is not None and change.old is not None:
                array = self._removed.get(change.name)
                self._set(change.before, self._build(change.before, change.old) if array is None else array)
            else:
                self._unset(change.name)
        self._flush(update)
        self._stamp = update.source

    def resume(self) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        self.hooks.invalidate_prefixes(self._stamp)
        self.hooks.resume()

    def discard(self, update: Update) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        self._flush(update)  # not in the pause: until the subscriber's log is dropped, it makes good what is lost
        self._built.clear()
        self._removed.clear()

    def _write(self, change: Change, side: Side, *, checked: bool = False) -> None:
        data = writable_bytes(self.arrays[change.name])
        for block in change.blocks:
            write_block(data, block, side, expect=("old",) if checked else ())

    def _exchange(self, change: Change) -> None:
        if change.name in self.arrays:
            self._removed.setdefault(change.name, self.arrays[change.name])
        if change.after is None:
            self._unset(change.name)
        else:
            assert change.new is not None
            built = self._built.get(change.name)
            self._set(change.after, self._build(change.after, change.new) if built is None else built)

    def _build(self, info: TensorInfo, data: Bytes) -> Any:
        if self.make is None:
            raise TargetError("this target has a fixed set of tensors", where=f"tensor {info.name!r}")
        return self.make(info, data)

    def _set(self, info: TensorInfo, array: Any) -> None:
        self.arrays[info.name] = array
        self._infos[info.name] = info

    def _unset(self, name: str) -> None:
        self.arrays.pop(name, None)
        self._infos.pop(name, None)

    def _flush(self, update: Update) -> None:
        for change in update.changes:
            array = self.arrays.get(change.name)
            if isinstance(array, np.memmap):
                array.flush()
