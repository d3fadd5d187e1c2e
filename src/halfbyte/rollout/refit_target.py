"""The in-process engine as the target of a refit.

The engine takes published weights (BF16, checkpoint names) and holds a copy of them: a change is patched into the copy, and only
the rows it touches are quantised and packed again. A version is packed beside the one that is served, shares every untouched
matrix with it, and the commit swaps one reference. The old version is kept until the refit is over, so the way back is
another swap. ``fp4_target`` does the same in FP4 coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import RefitError
from halfbyte.kernels import Kernels
from halfbyte.models.architecture import Architecture
from halfbyte.models.layout import ParameterLayout
from halfbyte.models.precision import Precision
from halfbyte.refit.arrays import Bytes, TensorInfo, flat_bytes, infos_of, writable_bytes
from halfbyte.refit.errors import LayoutError, WrongBaseError
from halfbyte.refit.patch import Change, Stamp, Update, write_block
from halfbyte.rollout.packer import Source
from halfbyte.rollout.weights import RolloutWeights, published

__all__ = ["EngineTarget", "Served", "SharedEngineTarget", "Staged", "checked_info", "ready"]

_SCALE = ".global_scale"


class Served(Protocol):
    """What a target needs of an engine."""

    @property
    def arch(self) -> Architecture: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def weights(self) -> RolloutWeights:
        """What is served."""

    def swap(self, weights: RolloutWeights) -> None:
        """Serve others."""


@dataclass(frozen=True, eq=False)
class Staged:
    """Weights of the next version and of this one, and what they were packed from."""

    after: RolloutWeights
    before: RolloutWeights
    source_after: Source
    source_before: Source
    rows: int


class EngineTarget:
    """Published weights in checkpoint coordinates; see the module's docstring, and ``halfbyte.refit.target`` for the calls.

    Arguments:
        engine: serves ``tensors``.
        tensors: what the engine was made from; they are copied.
        stamp: what they are, where that is known.

    Attributes:
        rows_quantised: rows that the last staged update quantised.
    """

    survives = False

    def __init__(self, engine: Served, tensors: Mapping[str, Tensor], *, stamp: Stamp | None = None) -> None:
        self._begin(engine, published(engine.arch, engine.precision, tensors), stamp)

    def _begin(self, engine: Served, source: Source, stamp: Stamp | None) -> None:
        self.engine, self.source = engine, source
        self.layout = ParameterLayout(engine.arch)
        self.rows_quantised = 0
        self._stamp = stamp
        self._staged: Staged | None = None
        arrays = dict(self.layout.checkpoint_views(source.params))
        self._infos = infos_of(arrays | {f"{name}{_SCALE}": scale for name, scale in source.scales.items()})

    def infos(self) -> Mapping[str, TensorInfo]:
        """Checkpoint names, dtypes and shapes, experts one by one; global scales that outlive versions."""
        return self._infos

    def stamp(self) -> Stamp | None:
        """What the engine serves."""
        return self._stamp

    def read(self, name: str) -> Bytes:
        """A published tensor's bytes."""
        return self._bytes(self.source, name)

    def stage(self, update: Update) -> None:
        """Patch copies of the touched parameters, and pack what they are part of.

        Raises:
            LayoutError: tensors are added, removed or re-shaped.
            NumericsError: a changed weight is NaN or infinite.
        """
        params, scales = dict(self.source.params), dict(self.source.scales)
        rows: dict[str, Tensor] = {}
        for change in update.changes:
            self._patch(change, params, scales, rows)
        self._pack(Source(params, scales), rows, update)

    def _pack(self, source: Source, rows: dict[str, Tensor], update: Update) -> None:
        after, self.rows_quantised = self.engine.weights.repacked(
            source, rows, self.engine.kernels, version=update.target.version
        )
        self._staged = Staged(after, self.engine.weights, source, self.source, self.rows_quantised)

    def pause(self) -> None:
        """Nothing to wait for: the engine steps only when its owner calls it."""

    def commit(self, update: Update) -> None:
        """Swap one reference."""
        staged = ready(self._staged)
        self.engine.swap(staged.after)
        self.source, self._stamp = staged.source_after, update.target

    def rollback(self, update: Update) -> None:
        """Swap it back."""
        staged = ready(self._staged)
        if self.engine.weights is not staged.before:
            self.engine.swap(staged.before)
        self.source, self._stamp = staged.source_before, update.source

    def resume(self) -> None:
        """Pages of other weights are never found: their digests begin with the weight version (NeMo RL #4018)."""

    def discard(self, update: Update) -> None:
        """Drop the version that is not served."""
        self._staged = None

    def _bytes(self, source: Source, name: str) -> Bytes:
        if name in self.layout.locations:
            return flat_bytes(self.layout.view(source.params, name))
        return flat_bytes(source.scales[name.removesuffix(_SCALE)])

    def _patch(
        self, change: Change, params: dict[str, Tensor], scales: dict[str, Tensor], rows: dict[str, Tensor]
    ) -> None:
        info = checked_info(change, self._infos)
        weight = info.name.removesuffix(_SCALE)
        where = self.layout.locations[weight]
        if info.name in self.layout.locations:
            if params[where.parameter] is self.source.params[where.parameter]:
                params[where.parameter] = params[where.parameter].clone()
            view = where.of(params[where.parameter])
        else:
            view = scales[weight] = scales[weight].clone()
        data = writable_bytes(view)
        for block in change.blocks:
            write_block(data, block, "new", expect=("old",))
        self._mark(change, params, rows)

    def _mark(self, change: Change, params: Mapping[str, Tensor], rows: dict[str, Tensor]) -> None:
        """Note which rows of a parameter a change touches; a new global scale touches none but has its matrix looked at."""
        where = self.layout.locations[change.name.removesuffix(_SCALE)]
        parameter = params[where.parameter]
        columns = max(parameter.shape[-1] if parameter.dim() > 1 else parameter.numel(), 1)
        mask = rows.setdefault(where.parameter, torch.zeros(parameter.numel() // columns, dtype=torch.bool))
        if change.name in self.layout.locations:
            touched = change.positions() // columns
            if where.expert is not None:
                touched += where.expert * parameter.shape[1] + where.begin
            mask.numpy()[touched] = True


class SharedEngineTarget(EngineTarget):
    """The engine in the trainer's own process: it packs the very tensors that were published, and holds no copy of them.

    Arguments:
        engine: serves what ``latest`` gives now; or what stands for one.
        latest: the weights last published. Tensors are replaced by the next publication, never written to.
        stamp: what they are.
    """

    def __init__(self, engine: Served, latest: Callable[[], Source], *, stamp: Stamp | None = None) -> None:
        self._latest = latest
        self._begin(engine, latest(), stamp)

    def stage(self, update: Update) -> None:
        """Pack what the update touches; see :meth:`EngineTarget.stage`.

        Raises:
            WrongBaseError: ``latest`` does not hold the values of the update.
        """
        source = self._latest()
        rows: dict[str, Tensor] = {}
        for change in update.changes:
            name = checked_info(change, self._infos).name
            held = self._bytes(source, name)
            for block in change.blocks:
                unit = block.new.itemsize
                count = block.count if block.positions is None else (held.size - block.begin) // unit
                view = held[block.begin : block.begin + count * unit].view(block.new.dtype)
                if not np.array_equal(view if block.positions is None else view[block.positions], block.new):
                    raise WrongBaseError(
                        "the weights at hand are not those that were published", where=f"tensor {name!r}"
                    )
            self._mark(change, source.params, rows)
        self._pack(source, rows, update)


def checked_info(change: Change, infos: Mapping[str, TensorInfo]) -> TensorInfo:
    if not change.in_place or change.before != infos.get(change.name):
        raise LayoutError(
            "a tensor is added, removed, re-shaped or unknown to the engine",
            where=f"tensor {change.name!r}",
            expected="the tensors of the engine's architecture",
            fix="make a new engine from the new version",
        )
    assert change.after is not None
    return change.after


def ready(staged: Staged | None) -> Staged:
    if staged is None:
        raise RefitError("nothing is staged", where="EngineTarget", expected="stage() before commit()")
    return staged
