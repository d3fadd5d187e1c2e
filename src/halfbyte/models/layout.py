"""Parameters in memory and their names in a checkpoint.

In memory the experts of a layer are two stacked tensors, as transformers 5 holds them:
``model.layers.i.mlp.experts.gate_up_proj`` [E, 2I, H] (gate rows first, then up) and ``...experts.down_proj``
[E, H, I]; a Mixtral router is ``model.layers.i.mlp.gate.weight``. Every other name is the checkpoint's. Checkpoints,
refits and trajectories speak checkpoint names only, one tensor per expert and projection; the views here share the
parameters' memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch

from halfbyte.errors import CheckpointError, ShapeError
from halfbyte.models.architecture import Architecture, expert_names, parameter_shapes, router_name

__all__ = ["Location", "ParameterLayout", "checkpoint_views", "from_checkpoint"]


@dataclass(frozen=True)
class Location:
    """Where a checkpoint tensor lies: all of a parameter, or rows [begin, end) of one expert in a stacked one."""

    parameter: str
    expert: int | None = None
    begin: int = 0
    end: int = 0

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of ``parameter`` (or of its gradient) that this location names; no copy."""
        return parameter if self.expert is None else parameter[self.expert, self.begin : self.end]


class ParameterLayout:
    """The names and shapes of an architecture's parameters in memory, and the map to checkpoint names.

    Attributes:
        shapes: parameter name -> shape, in the order of the forward pass.
        locations: checkpoint name -> :class:`Location`, in the same order.
    """

    def __init__(self, architecture: Architecture) -> None:
        a = architecture
        self.architecture = a
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.locations: dict[str, Location] = {}
        stacked: dict[str, Location] = {}
        for layer in a.moe_layers:
            prefix = f"model.layers.{layer}.mlp"
            width = a.moe_intermediate_size
            stacked[router_name(a, layer)] = Location(f"{prefix}.gate.weight")
            for expert in range(a.n_experts):
                gate, up, down = expert_names(a, layer, expert)
                stacked[gate] = Location(f"{prefix}.experts.gate_up_proj", expert, 0, width)
                stacked[up] = Location(f"{prefix}.experts.gate_up_proj", expert, width, 2 * width)
                stacked[down] = Location(f"{prefix}.experts.down_proj", expert, 0, a.hidden_size)
        for name, shape in parameter_shapes(a).items():
            location = stacked.get(name, Location(name))
            self.locations[name] = location
            if location.expert is None:
                self.shapes[location.parameter] = shape
            elif location.parameter.endswith("gate_up_proj"):
                self.shapes[location.parameter] = (a.n_experts, 2 * a.moe_intermediate_size, a.hidden_size)
            else:
                self.shapes[location.parameter] = (a.n_experts, a.hidden_size, a.moe_intermediate_size)

    def view(self, parameters: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """The tensor of checkpoint name ``name``, detached, sharing memory with ``parameters``.

        Raises:
            CheckpointError: the architecture has no such tensor.
        """
        if name not in self.locations:
            raise CheckpointError(f"tensor {name!r} does not belong to this {self.architecture.family} model")
        location = self.locations[name]
        return location.of(parameters[location.parameter].detach())

    def checkpoint_views(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, detached view) of every tensor, experts one by one, without copying.

        Works on any mapping by parameter name: weights, gradients, optimiser moments.
        """
        for name in self.locations:
            yield name, self.view(parameters, name)

    def from_checkpoint(
        self, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None, skip: Container[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Parameters by name, experts stacked, each a fresh contiguous tensor that shares nothing with ``tensors``.

        Arguments:
            tensors: by checkpoint name; names that the architecture lacks are ignored (the loader has refused them).
            dtype: of the result; None keeps each tensor's own (of a stack: its first expert's).
            skip: checkpoint names to leave out, of a stack all or none.
        Raises:
            CheckpointError: a tensor is missing.
            ShapeError: a tensor has another shape than the architecture says.
        """
        missing = [name for name in self.locations if name not in tensors and name not in skip]
        if missing:
            raise CheckpointError(f"{len(missing)} tensors are missing: {', '.join(missing[:5])}")
        expected = parameter_shapes(self.architecture)
        parameters: dict[str, torch.Tensor] = {}
        for name, location in self.locations.items():
            if name in skip:
                continue
            source = tensors[name]
            if tuple(source.shape) != expected[name]:
                raise ShapeError(f"tensor {name!r} has shape {tuple(source.shape)}", expected=str(expected[name]))
            if location.parameter not in parameters:
                shape = self.shapes[location.parameter]
                parameters[location.parameter] = torch.empty(shape, dtype=dtype or source.dtype)
            location.of(parameters[location.parameter]).copy_(source)
        return parameters


def checkpoint_views(
    parameters: Mapping[str, torch.Tensor], architecture: Architecture
) -> Iterator[tuple[str, torch.Tensor]]:
    """See :meth:`ParameterLayout.checkpoint_views`."""
    return ParameterLayout(architecture).checkpoint_views(parameters)


def from_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    architecture: Architecture,
    *,
    dtype: torch.dtype | None = None,
    skip: Container[str] = (),
) -> dict[str, torch.Tensor]:
    """See :meth:`ParameterLayout.from_checkpoint`."""
    return ParameterLayout(architecture).from_checkpoint(tensors, dtype=dtype, skip=skip)
