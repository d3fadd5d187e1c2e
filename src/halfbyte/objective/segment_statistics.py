"""What is known of each segment: how much its updates amplify the mismatch, and how much they contract it.

A policy-gradient update on a token moves its log-prob in the learner by the sign of A, so it widens the gap g iff A g > 0.
Facts of arXiv 2610.07043; the statistics are a reconstruction (its text does not give them).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.objective.correction import CorrectionInput
from halfbyte.objective.scale import gap_scale
from halfbyte.objective.sequences import dense_index, sequence_sum

__all__ = ["SegmentStatistics", "segment_statistics"]


@dataclass(frozen=True, eq=False)
class SegmentStatistics:
    """Diagnosed tokens and their segments. S segments hold a diagnosed token, N tokens are diagnosed.

    Arguments:
        places: [N] int64, flat places of the diagnosed tokens: they count, the current weights sampled them, and A < 0.
        segment: [N] int64, their segment, 0..S-1.
        amplifying, contracting: [N] float32 >= 0, nats: a = max(0, sign(A) g) and c = max(0, -sign(A) g).
        count: [S] float32, diagnosed tokens of each segment.
        amplification, contraction: [S] float32, nats: E = mean a, C = mean c.
        direction: [S] float32: t = sum psi(a - c) / sqrt(sum psi(a - c)^2), psi clipping at twice the size of healthy gaps;
            0 without any gap. Self-normalised and odd in the gaps, so if each gap is as likely to have one sign as the
            other, whatever their sizes, t is a sum of random signs with squared weights that add up to 1.
    """

    places: Tensor
    segment: Tensor
    amplifying: Tensor
    contracting: Tensor
    count: Tensor
    amplification: Tensor
    contraction: Tensor
    direction: Tensor

    @property
    def imbalance(self) -> Tensor:
        """[S] float32 in [-1, 1]: I = (E - C) / (E + C + 1e-8)."""
        total = self.amplification + self.contraction
        return (self.amplification - self.contraction) / (total + 1e-8)


@torch.no_grad()
def segment_statistics(tokens: CorrectionInput, *, floor: float = 0.02) -> SegmentStatistics:
    """Diagnose the negative-advantage tokens of a batch by segment.

    Sums run in float64 and are rounded once, so the order of tokens does not show. Without ``segments`` a sample is one.

    Arguments:
        floor: nats, smallest size of healthy gaps, see ``gap_scale``.
    """
    places = torch.nonzero(tokens.current & (tokens.advantages < 0))[:, 0]
    labels = tokens.sequence_index if tokens.segments is None else tokens.segments
    segment, count = dense_index(labels[places])
    gap = tokens.gap[places].float()
    amplifying, contracting = (-gap).clamp(min=0), gap.clamp(min=0)
    n = torch.bincount(segment, minlength=count).float()
    bound = 2.0 * gap_scale(tokens.gap[tokens.current].float(), floor)
    signed = (-gap).clamp(-bound, bound).double()
    spread = sequence_sum(signed.square(), segment, count).sqrt()
    return SegmentStatistics(
        places=places,
        segment=segment,
        amplifying=amplifying,
        contracting=contracting,
        count=n,
        amplification=sequence_sum(amplifying, segment, count) / n,
        contraction=sequence_sum(contracting, segment, count) / n,
        direction=(sequence_sum(signed, segment, count) / spread.clamp(min=1e-300)).float(),
    )
