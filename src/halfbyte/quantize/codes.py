"""Weights to codes, bit for bit as the engine packs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.formats import QuantSpec, QuantTensor, quantise_shared, shared_global
from halfbyte.kernels import Kernels, active
from halfbyte.models.architecture import site_of
from halfbyte.quantize.plan import Plan

__all__ = ["Quantised", "quantised_groups"]


@dataclass
class Quantised:
    """What a pass over the weights saw.

    Attributes:
        weights, values: how many became codes.
        differing: weight -> how many of its values differ from the engine's, for weights that share a global scale which the
            engine does not share: blocks far smaller than the largest of the group, whose scale is subnormal.
        error: sum of squared errors against the BF16 weights; ``energy``: sum of their squares.
    """

    weights: int = 0
    values: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    error: float = 0.0
    energy: float = 0.0


def quantised_groups(
    tensors: Mapping[str, Tensor], plan: Plan, spec: QuantSpec, seen: Quantised
) -> Iterator[tuple[str, QuantTensor]]:
    """(weight name, codes) of every weight of the plan, a group at a time, by the engine's kernels.

    The weights are rounded to BF16 first, as a rollout publishes them.

    Raises:
        NumericsError: a weight is not finite.
    """
    kernels = active()
    for group in plan.groups:
        weights = [tensors[name].to(torch.bfloat16).contiguous() for name in group]
        for name, weight, q in zip(group, weights, _together(kernels, weights, spec, group)):
            seen.weights += 1
            seen.values += weight.numel()
            values = q.dequantise()
            if len(group) > 1 and site_of(name) != "experts":
                own = kernels.quantise(weight, spec, name=name).dequantise()
                if count := int((own != values).sum()):
                    seen.differing[name] = count
            seen.error += float((values - weight.float()).square().sum(dtype=torch.float64))
            seen.energy += float(weight.float().square().sum(dtype=torch.float64))
            yield name, q


def _together(kernels: Kernels, weights: list[Tensor], spec: QuantSpec, names: tuple[str, ...]) -> list[QuantTensor]:
    if len(weights) == 1 or spec.global_scale != "tensor":
        return [kernels.quantise(w, spec, name=n) for w, n in zip(weights, names)]
    g = shared_global(weights, spec, names=names)
    if not bool(g > 0):  # all zero, in a convention that stores 0
        return quantise_shared(weights, spec, names=names)
    return [kernels.quantise(w, spec, global_scale=g, name=n) for w, n in zip(weights, names)]
