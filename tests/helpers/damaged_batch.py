"""Batches with planted damage, and TRIAGE with a healthy reference, for tests of the objective."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.objective import CorrectionInput, LossInput, PolicySettings, Triage, policy_loss
from halfbyte.objective.reference import Reference

VARIANTS = ("rebalance", "segment_is", "segment_mask", "cross_quadrant")
HEALTHY = Reference(loc=0.02, scale=0.01, length=16.0, batches=8.0)


def rule(**options: Any) -> Triage:
    """With a healthy reference, and a budget that does not bind unless asked."""
    return Triage(**({"q_max": 1.0} | options)).with_state(HEALTHY.to_state())


def damaged(seed: int, *, samples: int = 8, length: int = 48, versions: bool = False) -> CorrectionInput:
    """Segments of 16; noise of 0.05; about a third of the segments of A < 0 pushed down, a few gaps severe or exactly 0."""
    random = torch.Generator().manual_seed(seed)
    total = samples * length
    sequence = torch.arange(samples).repeat_interleave(length)
    advantages = torch.randn(samples, generator=random)[sequence]
    gap = 0.05 * torch.randn(total, generator=random)
    hit = (torch.rand(total // 16, generator=random) < 0.35).repeat_interleave(16)
    gap -= torch.where(hit, 0.1 + 0.6 * torch.rand(total, generator=random), 0.0)
    wild = torch.rand(total, generator=random) < 0.03
    gap = torch.where(wild, 6.0 * torch.randn(total, generator=random), gap)
    gap = torch.where(torch.rand(total, generator=random) < 0.05, 0.0, gap)
    return CorrectionInput(
        gap=gap,
        advantages=advantages,
        mask=torch.rand(total, generator=random) < 0.9,
        sequence_index=sequence,
        segments=torch.arange(total) // 16,
        versions=(torch.rand(total, generator=random) < 0.8).to(torch.int64) + 3 if versions else None,
        learner_version=4 if versions else None,
    )


def loss_and_slope(tokens: CorrectionInput, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    logp = (-torch.rand(len(tokens.mask), generator=random)).requires_grad_()
    record = LossInput(
        logp=logp,
        advantages=tokens.advantages,
        mask=tokens.mask,
        sequence_index=tokens.sequence_index,
        scale=torch.rand(len(tokens.mask), generator=random),
        old_logp=logp.detach() + 0.1 * torch.randn(len(tokens.mask), generator=random),
        weights=weights,
    )
    loss = policy_loss(record, PolicySettings()).loss
    return loss.detach(), torch.autograd.grad(loss, logp)[0]
