"""The in-process engine as the target of a refit.

The engine takes published weights (BF16, checkpoint names) and holds a copy of them: a change is patched into the copy, and only
the rows it touches are quantised and packed again. A version is packed beside the one that is served, shares every untouched
matrix with it, and the commit swaps one reference. The old version is kept until the refit is over, so the way back is
another swap. ``fp4_target`` does the same in FP4 coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import RefitError
from halfbyte.models.layout import ParameterLayout
from halfbyte.refit.arrays import Bytes, TensorInfo, flat_bytes, infos_of, writable_bytes
from halfbyte.refit.errors import LayoutError
from halfbyte.refit.patch import Change, Stamp, Update, write_block
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.packer import Source
from halfbyte.rollout.weights import RolloutWeights, published

__all__ = ["EngineTarget", "Staged", "checked_info", "ready"]

_SCALE = ".global_scale"


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

    def __init__(self, engine: Engine, tensors: Mapping[str, Tensor], *, stamp: Stamp | None = None) -> None:
        self.engine = engine
        self.layout = ParameterLayout(engine.arch)
        self.source = published(engine.arch, engine.precision, tensors)
        self.rows_quantised = 0
        self._stamp = stamp
        self._staged: Staged | None = None
        self._infos = infos_of(self._arrays())

    def infos(self) -> Mapping[str, TensorInfo]:
        """Checkpoint names, dtypes and shapes, experts one by one; global scales that outlive versions."""
        return self._infos

    def stamp(self) -> Stamp | None:
        """What the engine serves."""
        return self._stamp

    def read(self, name: str) -> Bytes:
        """A published tensor's bytes."""
        if name in self.layout.locations:
            return flat_bytes(self.layout.view(self.source.params, name))
        return flat_bytes(self.source.scales[name.removesuffix(_SCALE)])

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
        source = Source(params, scales)
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

    def _arrays(self) -> dict[str, Tensor]:
        arrays = dict(self.layout.checkpoint_views(self.source.params))
        return arrays | {f"{name}{_SCALE}": scale for name, scale in self.source.scales.items()}

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
        parameter = params[where.parameter]
        columns = max(parameter.shape[-1] if parameter.dim() > 1 else parameter.numel(), 1)
        mask = rows.setdefault(where.parameter, torch.zeros(parameter.numel() // columns, dtype=torch.bool))
        if info.name in self.layout.locations:
            touched = change.positions() // columns
            if where.expert is not None:
                touched += where.expert * parameter.shape[1] + where.begin
            mask.numpy()[touched] = True


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
