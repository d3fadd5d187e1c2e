"""An engine that only knows how to load checkpoints: its own ``load_weights`` says where every changed value goes.

Engines fuse q/k/v and gate/up, stack experts, transpose, slice for tensor parallelism and tie embeddings, each in its own
way. The adapter knows none of it. It lets the engine's loader run on scratch memory, on the changed checkpoint tensors
only: once on an explicit mask (one where a value changes, zero elsewhere), once on the new tensors. Where the mask
arrived, the new values are what the engine has to hold; everywhere else the second load has to give what the engine
holds already, and anything else is an error before the engine is paused. So NaN, -0 and infinities are values like any
other, and a loader that mixes elements (quantises on load, say) is found and not trusted.

Staging takes scratch memory twice the size of the engine's parameters; the commit is a scatter of the changed values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from halfbyte.refit.adapters.arrays import ArraysTarget, Hooks
from halfbyte.refit.arrays import DTYPE_BITS, Bytes, TensorInfo, flat_bytes, info_of, writable_bytes
from halfbyte.refit.errors import LayoutError, TargetError
from halfbyte.refit.patch import Change, Stamp, Update, write_block

__all__ = ["Loader", "LoaderTarget", "ModuleLoader"]

Bits = npt.NDArray[np.unsignedinteger]

#: Bits of the number one, by dtype: what a mask says where a value changes. Zero bits stand for "unchanged".
_ONE = {
    "BF16": 0x3F80, "F16": 0x3C00, "F32": 0x3F800000, "F64": 0x3FF0000000000000, "F8_E4M3": 0x38, "F8_E5M2": 0x3C,
    "F8_E8M0": 0x7F,
}  # fmt: skip


class Loader(Protocol):
    """What the adapter asks of an engine."""

    def parameters(self) -> Mapping[str, Any]:
        """The engine's own arrays by its own names: contiguous, writable, in this machine's memory."""
        ...

    def load(self, tensors: Iterable[tuple[str, Any]], into: Mapping[str, Any]) -> None:
        """Run the engine's ``load_weights`` on checkpoint tensors, writing to the arrays ``into`` (same names, dtypes and
        shapes as :meth:`parameters`) in place of its own."""
        ...

    def make(self, info: TensorInfo, data: Bytes) -> Any:
        """A tensor of the kind the loader expects, from its bytes."""
        ...

    def refresh(self, names: Collection[str]) -> None:
        """These parameters have changed: repack or invalidate whatever the engine derived from them."""
        ...


class ModuleLoader:
    """A torch module with a ``load_weights(iterable of (name, tensor))`` method, as serving engines have.

    Scratch memory takes the place of ``parameter.data`` while the loader runs, so loaders that hang on parameter objects work.

    Arguments:
        module: the model; its parameters and buffers are on the CPU.
        refresh: called with the names of changed parameters after a commit (repack layouts, say).
    """

    def __init__(self, module: Any, refresh: Any = None) -> None:
        self.module, self._refresh = module, refresh

    def parameters(self) -> Mapping[str, Any]:
        """Parameters and buffers by name; tied ones once."""
        seen: dict[int, str] = {}
        out: dict[str, Any] = {}
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if seen.setdefault(tensor.data_ptr() or id(tensor), name) == name:
                out[name] = tensor
        return out

    def load(self, tensors: Iterable[tuple[str, Any]], into: Mapping[str, Any]) -> None:
        """See :class:`Loader`."""
        own = self.parameters()
        before = {name: own[name].data for name in into}
        try:
            for name, scratch in into.items():
                own[name].data = scratch
            self.module.load_weights(iter(list(tensors)))
        finally:
            for name, data in before.items():
                own[name].data = data

    def make(self, info: TensorInfo, data: Bytes) -> Any:
        """See :class:`Loader`."""
        import torch

        dtypes = {
            "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
            "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
            "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
            "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
        }  # fmt: skip
        if info.dtype not in dtypes:
            raise LayoutError(f"torch has no dtype {info.dtype}", where=f"tensor {info.name!r}")
        if not len(data):
            return torch.empty(info.shape, dtype=dtypes[info.dtype])
        return torch.from_numpy(np.array(data)).view(dtypes[info.dtype]).reshape(info.shape)

    def refresh(self, names: Collection[str]) -> None:
        """See :class:`Loader`."""
        if self._refresh is not None:
            self._refresh(names)


@dataclass(frozen=True, eq=False)
class _Scatter:
    """New and old values at places of one engine parameter."""

    name: str
    positions: npt.NDArray[np.int64]
    old: Bits
    new: Bits


class LoaderTarget:
    """See the module's docstring, and :class:`~halfbyte.refit.target.Target` for the calls.

    Arguments:
        loader: the engine.
        base: the checkpoint that the engine was loaded from, by name: writable arrays of the adapter's own (memory, or
            a memory map of a copy). The engine itself cannot be read in checkpoint coordinates.
        stamp: what both hold, where that is known.
        hooks: pause, resume and prefix invalidation.
        check: load ``base`` once on construction and compare with what the engine holds.
    Raises:
        LayoutError: the engine holds something else than ``base``, so deltas would be projected onto wrong weights.
    """

    survives = False

    def __init__(
        self,
        loader: Loader,
        base: dict[str, Any],
        *,
        infos: Mapping[str, TensorInfo] | None = None,
        stamp: Stamp | None = None,
        hooks: Hooks | None = None,
        check: bool = True,
    ) -> None:
        self.loader = loader
        self.host = ArraysTarget(base, infos=infos, stamp=stamp, hooks=hooks)
        self._staged: list[_Scatter] = []
        if check:
            self._compare()

    def infos(self) -> Mapping[str, TensorInfo]:
        """Checkpoint names, dtypes and shapes."""
        return self.host.infos()

    def stamp(self) -> Stamp | None:
        """What is served."""
        return self.host.stamp()

    def read(self, name: str) -> Bytes:
        """A checkpoint tensor's bytes, from the host copy."""
        return self.host.read(name)

    def stage(self, update: Update) -> None:
        """Project every change into engine coordinates.

        Raises:
            LayoutError: tensors are added, removed or re-shaped; two checkpoint tensors want different values at one place.
            TargetError: the loader changes values that the mask does not name, or cannot carry a mask.
        """
        self.host.stage(update)
        if update.changes:
            self._staged = list(self._project(update.changes))

    def pause(self) -> None:
        """Stop drawing tokens."""
        self.host.pause()

    def commit(self, update: Update) -> None:
        """Scatter the new values."""
        self._scatter("new")
        self.host.commit(update)

    def rollback(self, update: Update) -> None:
        """Scatter the old values."""
        self._scatter("old")
        self.host.rollback(update)

    def resume(self) -> None:
        """Draw tokens again, without prefixes of other weights."""
        self.host.resume()

    def discard(self, update: Update) -> None:
        """Forget what was staged."""
        self._staged = []
        self.host.discard(update)

    def _scatter(self, side: str) -> None:
        own = self.loader.parameters()
        for part in self._staged:
            _bits(own[part.name])[part.positions] = getattr(part, side)
        self.loader.refresh([part.name for part in self._staged])

    def _compare(self) -> None:
        own = self.loader.parameters()
        scratch = {name: _copy(array) for name, array in own.items()}
        infos = self.infos()
        self.loader.load(((n, self.loader.make(infos[n], self.read(n))) for n in infos), scratch)
        odd = [name for name, array in own.items() if not np.array_equal(flat_bytes(array), flat_bytes(scratch[name]))]
        if odd:
            raise LayoutError(
                "the engine does not hold what its loader makes of the base checkpoint",
                where=", ".join(odd[:5]),
                expected="an engine loaded from these very tensors, and a loader that may run again",
                fix="load the base first; give the version that the engine serves as base",
            )

    def _project(self, changes: tuple[Change, ...]) -> Iterator[_Scatter]:
        new, masks = [], []
        for change in changes:
            info, values, mask = self._values_and_mask(change)
            new.append((info.name, self.loader.make(info, values)))
            masks.append((info.name, self.loader.make(info, mask)))
        own = self.loader.parameters()
        names = ", ".join(name for name, _ in new[:3]) + (", ..." if len(new) > 3 else "")
        with _blamed_on_the_loader(names):
            marks = {name: _zeros(array) for name, array in own.items()}
            self.loader.load(masks, marks)
            after = {name: _copy(array) for name, array in own.items()}
            self.loader.load(new, after)
        found = []
        for name, array in own.items():
            marked, served, wanted = _bits(marks[name]), _bits(array), _bits(after[name])
            positions = np.flatnonzero(marked)
            beside = wanted != served
            beside[positions] = False
            if (marked[positions] != _ONE.get(info_of(name, array).dtype, 1)).any() or beside.any():
                raise TargetError(
                    "the engine's loader does not move each value to a place of its own",
                    where=f"{names} into parameter {name!r}: {int(beside.sum())} values beside the mask change",
                    expected="a loader that copies, slices, transposes, stacks or casts",
                    fix="patch this engine through its own coordinates, or load full checkpoints",
                )
            if len(positions):
                found.append(_Scatter(name, positions, served[positions], wanted[positions]))
        if len(new) > 1:  # in the other order: tied names that disagree would leave the other one's values
            with _blamed_on_the_loader(names):
                self.loader.load(new[::-1], after)
            for part in found:
                if (_bits(after[part.name])[part.positions] != part.new).any():
                    raise LayoutError(
                        "two checkpoint tensors that share a parameter change to different values",
                        where=f"parameter {part.name!r}",
                        expected="equal bits under both names of a tie",
                    )
        yield from found

    def _values_and_mask(self, change: Change) -> tuple[TensorInfo, Bytes, Bytes]:
        """The tensor's bytes after the change, and ones where it changes."""
        info = change.after
        assert info is not None
        if DTYPE_BITS[info.dtype] < 8:
            raise LayoutError(
                "packed 4-bit codes cannot pass through a loader",
                where=f"tensor {info.name!r}",
                expected="one element a value",
            )
        values = np.array(self.read(change.name))
        for block in change.blocks:
            write_block(values, block, "new")
        mask = np.zeros(len(values), np.uint8)
        mask.view(np.dtype(f"<u{DTYPE_BITS[info.dtype] // 8}"))[change.positions()] = _ONE.get(info.dtype, 1)
        return info, values, mask


@contextmanager
def _blamed_on_the_loader(names: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever an engine's loader raises
        raise TargetError(f"the engine's loader failed: {error}", where=names) from error


def _bits(array: Any) -> Bits:
    """A flat view of an array's elements as unsigned integers."""
    width = DTYPE_BITS[info_of("", array).dtype] // 8
    return writable_bytes(array).view(np.dtype(f"<u{width}"))


def _zeros(array: Any) -> Any:
    out = _copy(array)
    writable_bytes(out)[:] = 0
    return out


def _copy(array: Any) -> Any:
    return array.detach().clone() if hasattr(array, "detach") else array.copy()
