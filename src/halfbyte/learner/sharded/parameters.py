"""Masters, published and effective weights in shards: every rank holds, updates, publishes and quantises its own rows.

Each layer is a module under FSDP2's ``fully_shard`` and so is the rest of the model: its parameters are the *effective*
weights, which are put together just before the layer runs (all-gather), freed after it, and whose gradients are summed into
shards (reduce-scatter). Rounding is straight-through, so a shard's gradient is its master's. A parameter is cut along its
first dimension: rows of a matrix, experts of a stack. Block scales lie along rows, so a shard is quantised where it is; only
a scale over a whole tensor needs to know all ranks' largest value. The codes are therefore those of one process, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from halfbyte.errors import CheckpointError, NumericsError, ShapeError
from halfbyte.formats import QuantSpec
from halfbyte.formats.global_scale import stored_global
from halfbyte.kernels import Kernels
from halfbyte.learner.parameters import Parameters
from halfbyte.learner.sharded.group import Group
from halfbyte.models.architecture import Architecture, parameter_shapes
from halfbyte.models.layout import Location, ParameterLayout
from halfbyte.models.precision import Kind, Precision

__all__ = ["ShardedParameters", "rows_of"]

Out = TypeVar("Out")


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """[begin, end) of the first dimension that a rank holds, as DTensor's ``Shard(0)`` and FSDP2 cut it."""
    chunk = -(-rows // size)
    return min(rows, rank * chunk), min(rows, (rank + 1) * chunk)


class _Part(nn.Module):
    """A layer's effective weights (or those outside of layers); calling it gathers them for the length of ``function``."""

    def forward(self, function: Callable[..., Out], *arguments: Any) -> Out:
        return function(*arguments)


class ShardedParameters(Parameters):
    """See :class:`Parameters`. ``masters`` are this rank's rows.

    Arguments:
        group: the ranks.
    """

    def __init__(
        self,
        arch: Architecture,
        tensors: Mapping[str, Tensor],
        precision: Precision,
        kernels: Kernels,
        *,
        group: Group,
        publish_dtype: torch.dtype = torch.bfloat16,
        rollout_precision: Precision | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._group, self.layout = group, ParameterLayout(arch)
        self._amax: dict[str, Tensor] = {}
        super().__init__(
            arch,
            tensors,
            precision,
            kernels,
            publish_dtype=publish_dtype,
            rollout_precision=rollout_precision,
            device=device,
        )

    def span(self, name: str) -> tuple[int, int]:
        """Rows of a parameter that this rank holds."""
        return rows_of(self.rows(name), self._group.rank, self._group.size)

    def rows(self, name: str) -> int:
        """Rows of a parameter over all ranks."""
        return self.layout.shapes[name][0]

    def _taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        missing = [name for name in self.layout.locations if name not in tensors]
        if missing:
            raise CheckpointError(f"{len(missing)} tensors are missing: {', '.join(missing[:5])}")
        masters, expected = {}, parameter_shapes(self.arch)
        for name, shape in self.layout.shapes.items():
            begin, end = self.span(name)
            masters[name] = torch.empty((end - begin, *shape[1:]), device=self.device)
        for name, location in self.layout.locations.items():
            source, (begin, end) = tensors[name], self.span(location.parameter)
            if tuple(source.shape) != expected[name]:
                raise ShapeError(f"tensor {name!r} has shape {tuple(source.shape)}", expected=str(expected[name]))
            master = masters[location.parameter]
            if location.expert is None:
                master.copy_(source[begin:end])
            elif begin <= location.expert < end:
                Location(name, location.expert - begin, location.begin, location.end).of(master).copy_(source)
        return masters

    def _leaves(self) -> dict[tuple[str, Kind], Tensor]:
        root, layers = _Part(), [_Part() for _ in range(self.arch.n_layers)]
        self._places: dict[tuple[str, Kind], tuple[_Part, str]] = {}
        for name in self.masters:
            part = layers[int(name.split(".")[2])] if name.startswith("model.layers.") else root
            for kind in self._kinds(name):
                attribute = f"{name.replace('.', '_')}__{kind}"
                part.register_parameter(
                    attribute, nn.Parameter(torch.empty(self.layout.shapes[name], dtype=torch.float32, device="meta"))
                )
                self._places[name, kind] = part, attribute
        root.layers = nn.ModuleList(layers)
        for part in (*layers, root):
            wrapped: FSDPModule = fully_shard(part, mesh=self._group.mesh)
            wrapped.set_gradient_divide_factor(1.0)  # the loss is divided by the global batch's denominators already
            wrapped.set_force_sum_reduction_for_comms(True)  # plain sums: gloo knows no scaled ones
        root.to_empty(device=self.device)
        self._root, self._layers = root, layers
        return {place: getattr(part, attribute) for place, (part, attribute) in self._places.items()}

    def run(self, function: Callable[[], Out]) -> Out:
        """See :meth:`Parameters.run`."""
        out = cast(Out, self._root(function))
        if not torch.is_grad_enabled():  # no backward pass will come and take the gathered weights apart
            cast(FSDPModule, self._root).reshard()
        return out

    def layer(self, index: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """See :meth:`Parameters.layer`."""
        return cast(Tensor, self._layers[index](function, x))

    def effective(self, name: str, kind: Kind | None = None) -> Tensor:
        """The gathered leaf, inside of :meth:`run` and :meth:`layer`."""
        part, attribute = self._places[name, kind or self._kinds(name)[0]]
        return cast(Tensor, getattr(part, attribute))

    @torch.no_grad()
    def refresh(self) -> bool:
        """See :meth:`Parameters.refresh`; collective, and the answer is the same on all ranks."""
        new = {name: master.to(self.publish_dtype, copy=True) for name, master in self.masters.items()}
        broken, changed, largest = self._agreed(new)
        if broken:
            raise NumericsError(
                "a master weight is not finite after the update",
                where=broken[0],
                fix="lower learner.lr; the last checkpoint is still good",
            )
        for name in changed:
            self._published[name], self._amax[name] = new[name], largest[name]
            if self.scales is not None:
                self.scales.update(self._scale_groups(name, new[name]))
            for kind in self._kinds(name):
                shard = cast(DTensor, self._effective[name, kind]).to_local()
                shard.copy_(self._rounded(name, kind, new[name].float()))
        return bool(changed)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`Parameters.published`; collective: every tensor is put together on every rank."""
        return self.layout.checkpoint_views({name: self.whole(name).cpu() for name in self.masters})

    def shards(self) -> Iterator[tuple[str, Tensor, int]]:
        """(checkpoint name, this rank's rows as published, the first of them) of every tensor that it holds any of."""
        for name, location in self.layout.locations.items():
            begin, end = self.span(location.parameter)
            held = self._published[location.parameter]
            if location.expert is None:
                if begin < end:
                    yield name, held, begin
            elif begin <= location.expert < end:
                yield name, held[location.expert - begin, location.begin : location.end], 0

    def whole(self, name: str) -> Tensor:
        """A published parameter, put together from all ranks; collective."""
        shape = self.layout.shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        held = DTensor.from_local(
            self._published[name], self._group.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        return held.full_tensor()

    def take_gradients(self) -> dict[str, Tensor]:
        """See :meth:`Parameters.take_gradients`: of this rank's rows, summed over all ranks' passes."""
        out: dict[str, Tensor] = {}
        for (name, _), leaf in self._effective.items():
            if leaf.grad is not None:
                gradient = cast(DTensor, leaf.grad).to_local()
                out[name] = gradient if name not in out else out[name] + gradient
                leaf.grad = None
        return out

    def _agreed(self, new: Mapping[str, Tensor]) -> tuple[list[str], list[str], dict[str, Tensor]]:
        """Over all ranks: masters that are not finite; parameters whose published bits changed; the largest magnitude of each
        matrix, float32 of shape (), and of each expert of a stack, [E]."""
        finite, differs, parts = [], [], []
        for name, master in self.masters.items():
            old = self._published.get(name)
            finite.append(bool(torch.isfinite(master).all()))
            differs.append(old is None or not torch.equal(new[name], old))
            count = self.layout.shapes[name][0] if master.dim() == 3 else 1
            part = torch.zeros(count)
            if master.dim() == 3:
                begin, end = self.span(name)
                part[begin:end] = new[name].float().abs().amax(dim=(1, 2)).cpu()
            elif master.numel():
                part[0] = new[name].float().abs().amax()
            parts.append(part)
        n = len(finite)
        flags = torch.tensor([float(not ok) for ok in finite] + [float(d) for d in differs])
        found = self._group.largest(torch.cat([flags, *parts]))
        names = list(self.masters)
        amax = found[2 * n :].split([len(part) for part in parts])
        values = {name: a if len(self.layout.shapes[name]) == 3 else a[0] for name, a in zip(names, amax)}
        broken = [name for name, flag in zip(names, found[:n].tolist()) if flag]
        return broken, [name for name, flag in zip(names, found[n : 2 * n].tolist()) if flag], values

    def _scale_groups(self, name: str, published: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """See :meth:`Parameters._scale_groups`, with the largest magnitude over all ranks in place of each tensor."""
        if published.dim() == 3:
            published = published.new_empty(self.layout.shapes[name], device="meta")
        groups = super()._scale_groups(name, published)
        amax = self._amax[name].view(-1)
        return {key: (amax[i : i + 1],) for i, key in enumerate(groups)}

    def _kept_scale(self, spec: QuantSpec, scale_name: str) -> Tensor | None:
        kept = super()._kept_scale(spec, scale_name)
        if kept is not None or spec.global_scale != "tensor" or scale_name not in self._amax:
            return kept  # an expert is whole on its rank
        amax = self._amax[scale_name]
        return stored_global(amax, spec) if float(amax) > 0 else None

    def _rounded(self, name: str, kind: Kind, published: Tensor) -> Tensor:
        begin, end = self.span(name)
        if kind in ("w4a16", "w4a4") and published.dim() == 2 and self.precision.weight_spec.scale_rows != 1:
            return super()._rounded(name, kind, self.whole(name).float())[begin:end]  # a scale may span two ranks
        return super()._rounded(name, kind, published) if published.numel() else published
