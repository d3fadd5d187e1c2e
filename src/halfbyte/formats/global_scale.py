"""The fp32 global scale: derived from an amax, stored in one of three conventions, read back as a multiplier.

Three conventions are in circulation, and one read as another is off by its square (llama.cpp #21095): the multiplier
(amax / 2688: torchao, ModelOpt, ours), its reciprocal (2688 / amax: compressed-tensors) and amax (fouroversix).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats.grid import E2M1_MAX
from halfbyte.formats.spec import GlobalConvention, QuantSpec

__all__ = [
    "LARGEST_MULTIPLIER",
    "check_global",
    "fixed_global",
    "multiplier_pair",
    "power_of_two_at_least",
    "stored_global",
    "to_convention",
]

_LARGEST = torch.finfo(torch.float32).max
LARGEST_MULTIPLIER = 2.0**116  # 2688 times it is finite


def power_of_two_at_least(t: Tensor) -> Tensor:
    """Smallest power of two >= t (float32, t >= 0), clamped to normal numbers; by exponent bits, so exact."""
    bits = t.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def _top(spec: QuantSpec, like: Tensor) -> Tensor:
    """6 * scale_max, of the dtype and on the device of ``like`` (CUDA multiplies by the reciprocal of a divisor on the CPU)."""
    return like.new_full((), E2M1_MAX * spec.scale_max)


def _store(g: Tensor, spec: QuantSpec) -> Tensor:
    if spec.global_convention == "reciprocal":
        return 1.0 / g
    return g * _top(spec, g) if spec.global_convention == "amax" else g


def fixed_global(spec: QuantSpec) -> Tensor:
    """The stored global scale of the modes ``constant`` and ``none``: float32, shape ()."""
    return _store(torch.tensor(spec.constant if spec.global_scale == "constant" else 1.0), spec)


def stored_global(amax: Tensor, spec: QuantSpec) -> Tensor:
    """Global scale of each amax (any shape, dtype of the input), as ``spec.global_convention`` stores it, in float32.

    An amax of zero gives ``spec.zero_global``; a result that overflows gives 1, the safe neutral value.
    """
    a = amax if spec.arithmetic == "input" else amax.to(torch.float32)
    top = _top(spec, a)
    if spec.global_rounding == "power_of_two":
        a = a.to(torch.float32)
        stored = _store(power_of_two_at_least(a / _top(spec, a)), spec)
    elif spec.global_convention == "amax":
        stored = a
    elif spec.global_convention == "reciprocal":
        stored = top * (1.0 / a) if spec.global_division == "reciprocal" else top / a
    else:
        stored = a * (1.0 / top) if spec.global_division == "reciprocal" else a / top
    stored = stored.to(torch.float32)
    stored = torch.where(torch.isfinite(stored), stored, 1.0)
    return torch.where(amax > 0, stored, spec.zero_global)


def multiplier_pair(stored: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(g, g'): the multiplier and its inverse as the spec's arithmetic sees them, float32, both positive and finite.

    A stored zero (an all-zero tensor in some libraries) reads as 1.
    """
    stored = torch.where(stored > 0, stored, 1.0)
    if spec.global_convention == "multiplier":
        return stored, (1.0 / stored).clamp(max=_LARGEST)
    inverse = stored if spec.global_convention == "reciprocal" else (_top(spec, stored) / stored).clamp(max=_LARGEST)
    return (1.0 / inverse).clamp(max=_LARGEST), inverse


def to_convention(stored: Tensor, spec: QuantSpec, convention: GlobalConvention) -> tuple[Tensor, QuantSpec]:
    """The same global scale stored another way, with the spec that says so. Exact for power-of-two global scales."""
    changed = spec.replace(global_convention=convention)
    if convention == spec.global_convention:
        return stored, spec
    return torch.where(stored > 0, _store(multiplier_pair(stored, spec)[0], changed), stored), changed


def check_global(global_scale: Tensor, leading: tuple[int, ...], spec: QuantSpec, name: str) -> Tensor:
    """A caller's global scale as float32 of shape () or ``leading``; must be positive and finite.

    An expert that calibration never reached typically arrives here with 0 or infinity (compressed-tensors #595).
    """
    g = global_scale.to(torch.float32)
    if g.numel() == 1 and tuple(g.shape) != leading:
        g = g.reshape(())
    if tuple(g.shape) not in ((), leading):
        raise ShapeError(
            f"the global scale of {name} does not fit",
            where=f"{name}: global scale {tuple(g.shape)}, rows {leading}",
            expected="one value, or one for each row",
        )
    if g.ndim and spec.scale_rows != 1:
        raise ShapeError(
            f"rows of {name} share block scales, so they cannot have a global scale each",
            where=f"{name}: global scale {tuple(g.shape)}",
            expected="one value",
        )
    multiplier = multiplier_pair(g, spec)[0]
    if not bool((torch.isfinite(g) & (g > 0) & (multiplier > 0) & (multiplier <= LARGEST_MULTIPLIER)).all()):
        raise NumericsError(
            f"the global scale of {name} is zero, negative, NaN or out of range",
            where=name,
            expected="a positive finite number (as a multiplier at most 2^116, so that 2688 of it is finite)",
            fix="calibrate it, or take it from the tensor (global_scale='tensor' or 'token')",
        )
    return g
