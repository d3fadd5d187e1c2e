"""Corrections on padded batches [B, T], as other trainers hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.objective.aggregate import read
from halfbyte.objective.correction import Correction, CorrectionInput, StatefulCorrection
from halfbyte.objective.gap import token_gap
from halfbyte.objective.segments import Segmenter, SegmentInput

__all__ = ["PaddedResult", "correct_padded"]


@dataclass(frozen=True, eq=False)
class PaddedResult:
    """What a correction decides about a padded batch.

    Arguments:
        weights: [B, T] float32, detached; they multiply the surrogate. 0 where mask is 0.
        rejected: [B, T] bool, tokens thrown out; whether they stay in the trainer's denominator is its business.
        metrics: numbers of this batch, names prefixed ``correction/``.
        correction: the rule to use for the next batch: with its memory of this one, if it has a memory.
    """

    weights: Tensor
    rejected: Tensor
    metrics: dict[str, float]
    correction: Correction


@torch.no_grad()
def correct_padded(
    correction: Correction,
    *,
    advantages: Tensor,
    rollout_logp: Tensor,
    learner_logp: Tensor,
    mask: Tensor,
    segmenter: Segmenter | None = None,
    delimiters: Tensor | None = None,
    versions: Tensor | None = None,
    learner_version: int | None = None,
) -> PaddedResult:
    """Apply a correction to a padded batch: the whole rollout batch of a step, not a micro-batch.

    Arguments:
        advantages: [B] or [B, T]. rollout_logp, learner_logp: [B, T], of the same distribution and the same weights (the
            learner's before its update). Float32; where mask is 0 anything, NaN included.
        mask: [B, T], bool or 0/1: response tokens that the policy produced.
        segmenter: cuts responses into segments; None: a response is one.
        delimiters: [B, T] bool, tokens that end a line or sentence, for segmenters that use them.
        versions: [B, T] int64 weight version of each token; learner_version: the current one. Both or neither.

    Raises:
        ShapeError: shapes do not fit.
        NumericsError: a value on a token that counts is not finite.
    """
    shape = mask.shape
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(-1, shape[-1]) if len(shape) == 2 else advantages
    named = {"advantages": advantages, "rollout_logp": rollout_logp, "learner_logp": learner_logp}
    named |= {k: v for k, v in (("delimiters", delimiters), ("versions", versions)) if v is not None}
    for name, values in named.items():
        if len(shape) != 2 or values.shape != shape:
            raise ShapeError(
                f"{name} is {list(values.shape)} and mask {list(shape)}",
                where=name,
                expected="[batch, tokens] for both",
            )
    counts = (mask != 0).reshape(-1)
    # Padding belongs to the row it stands in: a masked token between two others separates segments.
    sequence = torch.arange(shape[0], device=mask.device).repeat_interleave(shape[1])
    flat = {name: values.detach().reshape(-1) for name, values in named.items()}
    gap = token_gap(flat["learner_logp"].float(), flat["rollout_logp"].float(), counts, sequence)
    segments = None
    if segmenter is not None:
        layout = SegmentInput(
            mask=counts,
            sequence_index=sequence,
            versions=flat.get("versions"),
            delimiters=flat.get("delimiters"),
            gap=gap,
            advantages=flat["advantages"].float(),
        )
        segments = segmenter(layout)
    result = correction(
        CorrectionInput(
            gap=gap,
            advantages=flat["advantages"].float(),
            mask=counts,
            sequence_index=sequence,
            segments=segments,
            versions=flat.get("versions"),
            learner_version=learner_version,
            rollout_logp=flat["rollout_logp"].float(),
        )
    )
    following = correction
    if isinstance(correction, StatefulCorrection) and result.state is not None:
        following = correction.with_state(result.state)
    return PaddedResult(result.weights.view(shape), result.rejected.view(shape), read(result.metrics), following)
