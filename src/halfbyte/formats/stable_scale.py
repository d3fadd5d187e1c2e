"""Global scales that outlive a weight update: recomputed, frozen, or moved only when they must (reconstruction).

The codes of an NVFP4 tensor are relative to one global scale. Recomputing it after an update that moved the tensor's
largest value by one ulp re-rolls 3.6% of the codes of that tensor (an *avalanche*), although next to no weight changed.
``QuantSpec.global_update`` chooses what a series of versions does about it:

- ``recompute``: the rule of the spec, each time (a power-of-two rule moves rarely, amax / 2688 moves at every touch);
- ``frozen``: that of the first version, with headroom; larger values saturate, and are counted;
- ``hysteretic``: kept while the tensor's largest value lies in [1/BAND, 1] of what the scale can express, else set anew.

A pure function gives the next scale; :class:`StableScales` is the state of one series, saved with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.formats.global_scale import multiplier_pair, stored_global
from halfbyte.formats.grid import E2M1_MAX
from halfbyte.formats.spec import QuantSpec

__all__ = ["BAND", "HEADROOM", "ScaleUpdate", "StableScales", "next_global"]

#: A new scale can express values this many times as large as the largest it was made from.
HEADROOM = 2.0
#: A hysteretic scale is made anew once the largest value is below this share of what it can express. E4M3 block scales
#: span 2^14.8, so a tensor's blocks keep full precision down to 1 / (2^14.8 / BAND) of its largest value.
BAND = 8.0


def next_global(current: Tensor | None, amax: Tensor, spec: QuantSpec) -> Tensor:
    """The global scales of the next version.

    Arguments:
        current: stored scales of the version before, float32 of the shape of ``amax``; None for the first version.
        amax: largest magnitude of each tensor, float32, any shape.
        spec: with ``global_scale = "tensor"``; scales are in its convention.
    Raises:
        ConfigError: another mode, where there is no scale to keep.
    """
    if spec.global_scale != "tensor":
        raise ConfigError(
            f"global_update = {spec.global_update!r} with global_scale = {spec.global_scale!r}",
            where=f"spec {spec.name!r}",
            expected="global_scale = 'tensor': only such a scale depends on the version",
        )
    if spec.global_update == "recompute":
        return stored_global(amax, spec)
    fresh = stored_global(amax * HEADROOM, spec)
    if current is None:
        return fresh
    if spec.global_update == "frozen":
        return current
    top = _largest(current, spec)
    return torch.where((amax <= top) & (amax >= top / BAND), current, fresh)


def _largest(stored: Tensor, spec: QuantSpec) -> Tensor:
    """The largest magnitude that codes under these scales can express."""
    return multiplier_pair(stored, spec)[0] * (E2M1_MAX * spec.scale_max)


@dataclass(frozen=True)
class ScaleUpdate:
    """What an update did to the scales.

    Arguments:
        names: tensors (or groups of fused ones) seen, in order.
        scales: their global scales, float32 [n], in the spec's convention.
        avalanches: names whose scale changed: all their codes were rolled anew.
        saturated: names with values beyond what their scale can express (frozen only).
    """

    names: tuple[str, ...]
    scales: Tensor
    avalanches: tuple[str, ...] = ()
    saturated: tuple[str, ...] = ()

    def of(self, name: str) -> Tensor:
        """The scale of one tensor, float32 of shape ()."""
        return self.scales[self.names.index(name)]


@dataclass
class StableScales:
    """The global scales of a series of versions, by name.

    Arguments:
        spec: the quantiser's choices; ``global_update`` is the policy.
        current: stored scales by name, float32 of shape ().
        avalanches: how many scales have changed so far, over all tensors and versions.
    """

    spec: QuantSpec
    current: dict[str, Tensor] = field(default_factory=dict)
    avalanches: int = 0

    def update(self, groups: Mapping[str, Sequence[Tensor]]) -> ScaleUpdate:
        """Move on to a new version.

        Arguments:
            groups: name -> the tensors that share one scale (one tensor; gate and up of an expert).
        """
        if not groups:
            return ScaleUpdate((), torch.empty(0))
        names = tuple(groups)
        amax = torch.stack([_amax(tensors) for tensors in groups.values()])
        fresh = next_global(None, amax, self.spec)
        known = torch.tensor([name in self.current for name in names])
        before = torch.stack([self.current.get(name, fresh[i]) for i, name in enumerate(names)])
        after = torch.where(known, next_global(before, amax, self.spec), fresh)
        moved = known & (after != before)
        over = amax > _largest(after, self.spec)
        for i, name in enumerate(names):
            if bool(amax[i] > 0):  # an all-zero tensor says nothing about the scale that its first values will need
                self.current[name] = after[i].clone()
        self.avalanches += int(moved.sum())
        return ScaleUpdate(names, after, _chosen(names, moved), _chosen(names, over))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores: scales by name, float32 of shape (1,)."""
        return {name: scale.reshape(1) for name, scale in self.current.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from :meth:`state`.

        Raises:
            CheckpointError: a scale is not one positive finite float32.
        """
        for name, scale in state.items():
            if scale.numel() != 1 or scale.dtype != torch.float32 or not bool(torch.isfinite(scale) & (scale > 0)):
                raise CheckpointError(
                    "a saved global scale cannot be used", where=name, expected="one positive finite float32"
                )
        self.current = {name: scale.reshape(()).clone() for name, scale in state.items()}


def _amax(tensors: Sequence[Tensor]) -> Tensor:
    largest = [t.detach().abs().amax().to(torch.float32) for t in tensors if t.numel()]
    return torch.stack(largest).amax().cpu() if largest else torch.zeros(())


def _chosen(names: Sequence[str], mask: Tensor) -> tuple[str, ...]:
    return tuple(name for name, chosen in zip(names, mask.tolist()) if chosen)
