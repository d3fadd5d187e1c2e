"""The way of the weights where the learner's are sharded: every rank encodes the change of what it holds, rank 0 publishes.

A tensor that lies on one rank (an expert) is encoded there, and so is a matrix that is cut between blocks of the codec; of
any other tensor the changed rows go to rank 0, which encodes. The model is put together for the first version alone. The store
gets the very bytes that one process would publish of the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfbyte.learner.learner import Learner
from halfbyte.learner.sharded.parameters import ShardedParameters, rows_of
from halfbyte.models.precision import Precision
from halfbyte.models.safetensors_io import DTYPES
from halfbyte.refit.arrays import Bytes, TensorInfo, flat_bytes, info_of, infos_of
from halfbyte.refit.codec import Hashes, TensorDelta, block_hashes, encode, joined, whole_blocks
from halfbyte.refit.head import read_head
from halfbyte.refit.objects import read_object, write_object
from halfbyte.refit.publisher import Published, PublishOptions
from halfbyte.refit.store.filesystem import FilesystemStore
from halfbyte.rollout.packer import Source
from halfbyte.rollout.weights import published
from halfbyte.train.agreement import together
from halfbyte.train.rollouts import RankedRollouts, WeightSource
from halfbyte.train.weights import OPTIONS, WeightPath

__all__ = ["ShardedWeightPath"]


class ShardedWeightPath:
    """See :class:`WeightPath`; every call is collective, metrics are rank 0's.

    Arguments:
        tensors: all published tensors, put together (they are there for the engine anyway).
    """

    def __init__(
        self,
        folder: Path,
        rollouts: RankedRollouts,
        learner: Learner,
        tensors: Mapping[str, Tensor],
        version: int,
        delta_precision: Precision | None = None,
        options: PublishOptions = OPTIONS,
    ) -> None:
        assert isinstance(learner.parameters, ShardedParameters)
        self.ranks, self.rollouts, self.parameters, self.options = learner.ranks, rollouts, learner.parameters, options
        self._lead: _Lead | None = None

        def opened() -> None:
            self._lead = _Lead(folder, rollouts, learner, tensors, version, delta_precision, options)

        together(self.ranks, opened if self.ranks.rank == 0 else lambda: None)
        if self.ranks.rank:
            found = read_head(FilesystemStore(folder))
            assert found is not None
            stamp = found[0].stamp
            assert stamp is not None
            rollouts.connect(WeightSource(folder, stamp, _nowhere))
        self._names = set(tensors)
        self._held = self._kept()

    def publish(self, version: int) -> dict[str, float]:
        """See :meth:`WeightPath.publish`."""
        scales = self.parameters.published_scales()
        whole = None
        if not scales.keys() <= self._names:  # a scale that HEAD lacks: the version is written tensor by tensor
            whole = dict(self.parameters.published()) | scales
            self._names |= scales.keys()
        parts = self.ranks.collect(write_object({} if whole else self._changes()))
        if whole:
            self._held = self._kept()
        row: dict[str, float] = {}

        def published() -> None:
            if self._lead is not None:
                self._lead.whole, self._lead.parts = whole, [read_object(data) for data in parts]
                row.update(self._lead.publish(version))

        together(self.ranks, published)
        together(self.ranks, self.rollouts.follow)
        return row

    def _kept(self) -> dict[str, _Held]:
        out = {}
        for name, rows, first in self.parameters.shards():
            dtype, block = info_of(name, rows).dtype, self.options.block
            hashes = None if self._is_loose(name) else block_hashes(dtype, flat_bytes(rows), block)
            out[name] = _Held(rows, first, hashes)
        return out

    def _is_loose(self, name: str) -> bool:
        """Whether a tensor is cut within a block, so that rank 0 encodes it."""
        location = self.parameters.layout.locations[name]
        shape = self.parameters.layout.shapes[location.parameter]
        if location.expert is not None:
            return False
        width = math.prod(shape[1:])
        cuts = [rows_of(shape[0], rank, self.ranks.size)[1] * width for rank in range(self.ranks.size)]
        return not whole_blocks(cuts, shape[0] * width, self.options.block)

    def _changes(self) -> dict[str, bytes | Bytes]:
        """What became of this rank's rows: ``delta NAME``, the change of all it holds of a tensor; ``rows FIRST NAME``, rows as
        they are now."""
        out: dict[str, bytes | Bytes] = {}
        for name, rows, first in self.parameters.shards():
            held = self._held[name]
            now, before = flat_bytes(rows), flat_bytes(held.rows)
            if held.hashes is None:
                if not np.array_equal(now, before):
                    out[f"rows {first} {name}"] = now
                hashes = None
            else:
                delta = encode(
                    info_of(name, rows).dtype,
                    before,
                    now,
                    self.options.profile,
                    block=self.options.block,
                    base_hashes=held.hashes,
                )
                out[f"delta {name}"] = delta.to_bytes()
                hashes = delta.table["target"].astype(np.uint64)
            self._held[name] = _Held(rows, first, hashes)
        return out


@dataclass(eq=False)
class _Held:
    """What a rank published last of a tensor: its rows, the first of them, hashes of its blocks where it is encoded here."""

    rows: Tensor
    first: int
    hashes: Hashes | None


class _Lead(WeightPath):
    """Rank 0's part.

    Attributes:
        parts: what the ranks said of the next version, in order of rank.
        whole: or all its tensors.
    """

    def __init__(
        self,
        folder: Path,
        rollouts: RankedRollouts,
        learner: Learner,
        tensors: Mapping[str, Tensor],
        version: int,
        delta_precision: Precision | None,
        options: PublishOptions,
    ) -> None:
        self.parts: list[Mapping[str, Bytes]] = []
        self.whole: Mapping[str, Tensor] | None = tensors
        super().__init__(folder, rollouts, learner, version, delta_precision, options)
        self.whole = None

    def _tensors(self) -> dict[str, Tensor]:
        if self.whole is not None:
            self._infos = infos_of(self.whole)
            return dict(self.whole)
        return {name: self._copied(info) for name, info in self._infos.items()}

    def _copied(self, info: TensorInfo) -> Tensor:
        """A published tensor as it is now; the publisher writes to its own."""
        held = torch.from_numpy(self.publisher.held(info.name).copy())
        return held.view(DTYPES[info.dtype]).reshape(info.shape)

    def _latest(self) -> Source:
        return published(self.learner.arch, self.learner.rollout_precision, self._tensors())

    def _next(self, version: int) -> Published:
        if self.whole is not None:
            return super()._next(version)
        deltas: dict[str, list[TensorDelta]] = {}
        rows: dict[str, Bytes] = {}
        for part in self.parts:
            for entry, data in part.items():
                kind, _, rest = entry.partition(" ")
                if kind == "delta":
                    deltas.setdefault(rest, []).append(TensorDelta.from_bytes(data, where=f"a rank's {entry}"))
                    continue
                first, _, name = rest.partition(" ")
                if name not in rows:
                    rows[name] = self.publisher.held(name).copy()
                row_bytes = rows[name].size // self._row_count(name)
                rows[name][int(first) * row_bytes : int(first) * row_bytes + data.size] = data
        found = {name: joined(parts) for name, parts in deltas.items()}
        scales = self.learner.parameters.published_scales()
        arrays = rows | {name: flat_bytes(scale) for name, scale in scales.items()}
        found |= {name: self.publisher.delta(name, data) for name, data in arrays.items()}
        return self.publisher.publish_deltas(found, version=version)

    def _row_count(self, name: str) -> int:
        parameters = self.learner.parameters
        assert isinstance(parameters, ShardedParameters)
        return parameters.layout.shapes[parameters.layout.locations[name].parameter][0]


def _nowhere() -> Source:
    raise AssertionError("this rank's engine follows the store")
