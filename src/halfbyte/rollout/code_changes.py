"""How two versions of the packed weights differ in FP4 coordinates: codes, block scales, and avalanches."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

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
    """Compare what two versions have packed; matrices they share cost nothing."""
    total = CodeChanges()
    stores = [(w.store, after.linears[key].store) for key, w in before.linears.items()]
    for key, experts in before.experts.items():
        stores += [(experts.gate_up, after.experts[key].gate_up), (experts.down, after.experts[key].down)]
    for old, new in stores:
        a = old.unpacked()
        if a is None:
            continue
        if old is new:
            total += CodeChanges(codes=2 * a.codes.numel(), scales=a.scales.numel())
            continue
        b = new.unpacked()
        assert b is not None
        difference = a.codes ^ b.codes
        by_row = ((difference & 15 != 0).int() + (difference > 15).int()).flatten(0, -2).sum(-1)
        moved = (a.global_scale != b.global_scale).reshape(-1)
        # rows of one tensor share a global scale: a new one begins where the scale or the matrix changes
        values = torch.stack([a.global_scale.reshape(-1), b.global_scale.reshape(-1)])
        first = torch.ones_like(moved)
        first[1:] = (values[:, 1:] != values[:, :-1]).any(0)
        if a.global_scale.dim() == 2:
            first[:: a.shape[-2]] = True
        total += CodeChanges(
            codes=2 * a.codes.numel(),
            scales=a.scales.numel(),
            changed_codes=int(by_row.sum()),
            changed_scales=int((a.scales != b.scales).sum()),
            avalanches=int((moved & first).sum()),
            avalanche_codes=int(by_row[moved].sum()),
        )
    return total
