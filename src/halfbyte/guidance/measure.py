"""How far the learner's own rounding is from the rollout's, before and after guidance, by layer and site."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.formats import Payload, PayloadBits, QuantTensor, signed_index, unpack_codes
from halfbyte.guidance.batch import Guide
from halfbyte.kernels import Kernels

__all__ = ["FAR", "Comparison", "Observer"]

#: Code differences of this size and more are counted together.
FAR = 3


@dataclass
class Comparison:
    """Counts of one site.

    Arguments:
        values, blocks: numbers and block scales compared.
        mismatched: numbers whose own code (own scale, to nearest) is not the rollout's. With fewer than 4 bits a payload shows
            only codes that differ in what it holds.
        scales: blocks whose effective scale (block scale times global scale) differs.
        differences: numbers by |difference of the codes| in steps of the grid: 0, 1, 2, 3 and more; 4 bits only.
        left: numbers that differ from the rollout's value after rounding under guidance; 4 bits only.
        left_by_bits: the same for payloads of 1, 2 and 4 bits, where it was asked for.
        error, size: sums of squares of own minus rollout's dequantised value, and of the rollout's; 4 bits only.
    """

    values: int = 0
    blocks: int = 0
    mismatched: int = 0
    scales: int = 0
    differences: list[int] = field(default_factory=lambda: [0] * (FAR + 1))
    left: int = 0
    left_by_bits: dict[int, int] = field(default_factory=dict)
    error: float = 0.0
    size: float = 0.0
    whole: bool = True

    def add(self, other: Comparison) -> None:
        """Add another site's counts."""
        for name in ("values", "blocks", "mismatched", "scales", "left", "error", "size"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.differences = [a + b for a, b in zip(self.differences, other.differences)]
        self.whole &= other.whole

    @property
    def mismatch(self) -> float:
        """Share of the codes that differ."""
        return self.mismatched / self.values if self.values else 0.0

    @property
    def recovered(self) -> float:
        """Share of the differing numbers that guidance makes equal (4 bits only)."""
        return 1.0 - self.left / self.mismatched if self.mismatched else 1.0

    @property
    def relative_difference(self) -> float:
        """|own - rollout's| / |rollout's| over the dequantised values (4 bits only)."""
        return (self.error / self.size) ** 0.5 if self.size else 0.0


class Observer:
    """Compares the first ``tokens`` guided tokens of every site it is shown; later batches of the step are not looked at.

    Arguments:
        thorough: fill ``left_by_bits``.
    """

    def __init__(self, kernels: Kernels, tokens: int, *, thorough: bool = False) -> None:
        self.kernels, self.tokens, self.thorough = kernels, tokens, thorough
        self.found: dict[tuple[int, str], Comparison] = {}

    @torch.no_grad()
    def see(self, x: Tensor, guide: Guide) -> None:
        """Note the activations ``x`` [R, ..., K] that are about to be rounded under ``guide``."""
        key = (guide.layer, guide.site)
        if key in self.found or self.tokens == 0:
            return
        rows = _guided_rows(guide.guided[: 2 * self.tokens])[
            : self.tokens
        ]  # mostly there, and found without reading all
        if len(rows) < self.tokens:
            rows = _guided_rows(guide.guided)[: self.tokens]
        if len(rows):
            self.found[key] = _compare(
                self.kernels, x.detach().index_select(0, rows), guide.select(rows), self.thorough
            )

    def total(self) -> Comparison:
        """All sites together."""
        out = Comparison()
        for part in self.found.values():
            out.add(part)
        return out

    def metrics(self) -> dict[str, float]:
        """``align/...`` of a step: over all sites, and the mismatch and the relative difference of each layer and site."""
        if not self.found:
            return {}
        total = self.total()
        out = {
            "align/code_mismatch": total.mismatch,
            "align/scale_mismatch": total.scales / total.blocks,
        }
        if total.whole:
            names = ("0", "1", "2", "3_or_more")
            out |= {f"align/code_difference_{n}": c / total.values for n, c in zip(names, total.differences)}
            out["align/code_mismatch_guided"] = total.left / total.values
            out["align/relative_difference"] = total.relative_difference
        for (layer, site), part in sorted(self.found.items()):
            out[f"align/code_mismatch/{layer}/{site}"] = part.mismatch
            if part.whole:
                out[f"align/relative_difference/{layer}/{site}"] = part.relative_difference
        return out


def _compare(kernels: Kernels, x: Tensor, guide: Guide, thorough: bool) -> Comparison:
    payload = guide.payload
    own, told = kernels.quantise_with_payload(x.contiguous(), payload.spec, payload.bits, name=guide.site)
    asked: tuple[PayloadBits, ...] = (1, 2, 4) if thorough else (4,)
    whole = payload.bits == 4
    out = Comparison(values=x.numel(), blocks=own.scales.numel(), whole=whole)
    same_codes, same_scales = _same(told, payload)
    if whole and same_scales and same_codes:
        out.differences = [x.numel()] + [0] * FAR
        out.left_by_bits = dict.fromkeys(asked, 0)  # the own code is the neighbour that every payload points at
        out.size = float(kernels.dequantise(own).double().square().sum())
        return out
    if not same_scales:
        at_theirs = QuantTensor(own.codes, payload.scales, payload.global_scale, payload.spec, own.shape)
        scales = [q.scale_values() * (g.unsqueeze(-1) if (g := q.multiplier()).dim() else g) for q in (own, at_theirs)]
        out.scales = int((scales[0] != scales[1]).sum())
    if not whole:
        out.mismatched = 0 if same_codes else int((told.residues() != payload.residues()).sum())
        return out
    theirs = payload.quantised()
    distance = (_index(own) - _index(theirs)).abs().clamp(max=FAR)
    out.differences = torch.bincount(distance.flatten(), minlength=FAR + 1).tolist()
    out.mismatched = out.values - out.differences[0]
    wanted = kernels.dequantise(theirs)
    for bits in asked:
        rounded = kernels.guided_round(x.contiguous(), kernels.payload(theirs, bits), name=guide.site)
        out.left_by_bits[bits] = int((rounded != wanted).sum())
    out.left = out.left_by_bits[4]
    out.error = float((kernels.dequantise(own) - wanted).double().square().sum())
    out.size = float(wanted.double().square().sum())
    return out


def _guided_rows(guided: Tensor) -> Tensor:
    return (guided if guided.dim() == 1 else guided.flatten(1).all(dim=1)).nonzero().view(-1)


def _same(own: Payload, theirs: Payload) -> tuple[bool, bool]:
    """Whether all codes are the learner's own, and all scales, as they mostly are where the gap is small: found as packed."""
    scales = torch.equal(own.scales, theirs.scales) and torch.equal(own.global_scale, theirs.global_scale)
    return torch.equal(own.codes, theirs.codes), scales


def _index(q: QuantTensor) -> Tensor:
    return signed_index(unpack_codes(q.codes)).long()
