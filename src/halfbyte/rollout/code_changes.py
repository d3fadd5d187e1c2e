"""How two versions of the packed weights differ in FP4 coordinates: codes, block scales, and avalanches."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from halfbyte.kernels.weights import WeightStore
from halfbyte.rollout.weights import RolloutWeights

__all__ = ["CodeChanges", "code_changes"]


@dataclass(frozen=True)
class CodeChanges:
    """How two versions differ in FP4 coordinates.

    Arguments:
        codes, scales: elements compared.
        changed_codes, changed_scales: elements that differ.
        avalanches: matrices (or experts) whose global scale differs: all their codes were rolled anew.
        avalanche_codes: changed codes in those.
    """

    codes: int = 0
    scales: int = 0
    changed_codes: int = 0
    changed_scales: int = 0
    avalanches: int = 0
    avalanche_codes: int = 0

    def __add__(self, other: CodeChanges) -> CodeChanges:
        return CodeChanges(*(a + b for a, b in zip(astuple(self), astuple(other))))


def code_changes(before: RolloutWeights, after: RolloutWeights) -> CodeChanges:
    """Compare what two versions have packed; matrices they share are only counted."""
    total = CodeChanges()
    stores = [(w.store, w.n * w.k, after.linears[key].store) for key, w in before.linears.items()]
    for key, w in before.experts.items():
        size = w.n_experts * w.intermediate * w.hidden
        stores += [(w.gate_up, 2 * size, after.experts[key].gate_up), (w.down, size, after.experts[key].down)]
    for old, size, new in stores:
        a, b = old.parts(), new.parts()
        if a is None or b is None:
            continue
        total += CodeChanges(codes=size, scales=size // before.precision.weight_spec.block)
        if old is not new:
            codes = int(_nibbles(a[0] ^ b[0]).sum())
            total += CodeChanges(changed_codes=codes, changed_scales=int((a[1] != b[1]).sum()))
            if not torch.equal(a[2], b[2]):
                total += _avalanches(old, new)
    return total


def _nibbles(difference: Tensor) -> Tensor:
    """How many of each byte's two codes differ."""
    return (difference & 15 != 0).to(torch.uint8) + (difference > 15)


def _avalanches(old: WeightStore, new: WeightStore) -> CodeChanges:
    a, b = old.unpacked(), new.unpacked()
    assert a is not None
    assert b is not None
    by_row = _nibbles(a.codes ^ b.codes).flatten(0, -2).sum(-1)
    values = torch.stack([a.global_scale.reshape(-1), b.global_scale.reshape(-1)])
    moved = values[0] != values[1]
    # rows of one tensor share a global scale: another tensor begins where a scale differs from the row before
    first = torch.ones_like(moved)
    first[1:] = (values[:, 1:] != values[:, :-1]).any(0)
    if a.global_scale.dim() == 2:
        first[:: a.shape[-2]] = True
    return CodeChanges(avalanches=int((moved & first).sum()), avalanche_codes=int(by_row[moved].sum()))
