"""Corrections inside TRL's GRPO trainer. Plain functions on its batch of tensors; TRL itself is not imported.

TRL takes advantages of shape [B, T] as well as [B], and its surrogate min(r A, clip(r) A) is homogeneous in A: multiplying A by
a weight multiplies the surrogate by it. So a correction is one line in a subclass:

    class Trainer(trl.GRPOTrainer):
        correction = make_correction("triage")

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            done = correct_grpo_batch(batch, self.correction)
            self.correction = done.correction
            return batch | {"advantages": done.advantages}

``examples/trl_triage.py`` is that, whole. Written against TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, DataError
from halfbyte.objective.correction import Correction
from halfbyte.objective.padded import correct_padded
from halfbyte.objective.segments import Segmenter

__all__ = ["CorrectedBatch", "correct_grpo_batch"]


@dataclass(frozen=True, eq=False)
class CorrectedBatch:
    """A batch's advantages with the weights of a correction.

    Arguments:
        advantages: [B, T] float32, to put in place of the batch's.
        weights: [B, T] float32.
        metrics: numbers, names prefixed ``correction/``.
        correction: for the next batch.
    """

    advantages: Tensor
    weights: Tensor
    metrics: dict[str, float]
    correction: Correction


@torch.no_grad()
def correct_grpo_batch(
    batch: Mapping[str, Any],
    correction: Correction,
    *,
    segmenter: Segmenter | None = None,
    delimiters: Tensor | None = None,
) -> CorrectedBatch:
    """Weigh the advantages of a generation batch, before it is split into micro-batches.

    Arguments:
        batch: ``advantages`` [B] or [B, T], ``completion_mask`` [B, T], ``tool_mask`` [B, T] where tools were called,
            ``old_per_token_logps`` [B, T] (the trainer's) and ``sampling_per_token_logps`` [B, T] (of vLLM or a
            ``rollout_func``). Where the sampler's log-prob is NaN (unavailable) the token is not corrected.
        correction, segmenter, delimiters: see ``correct_padded``.

    Raises:
        DataError: log-probs of one side are missing; the message says which setting provides them.
        ConfigError: TRL corrects by the ratio as well.
    """
    for key, fix in (
        ("sampling_per_token_logps", "sample with vLLM, or return logprobs from rollout_func"),
        ("old_per_token_logps", "compute them with the trainer's weights before the update (num_iterations=2 does)"),
    ):
        if batch.get(key) is None:
            raise DataError(f"the batch has no {key}", where="GRPO batch", expected="log-probs of both sides", fix=fix)
    if correction.uses_ratio and batch.get("importance_sampling_ratio") is not None:
        raise ConfigError(
            f"TRL's own importance sampling and correction {correction.name!r} would apply the ratio twice",
            where="vllm_importance_sampling_correction",
            expected="one of the two",
            fix="set vllm_importance_sampling_correction=False",
        )
    mask = batch["completion_mask"] != 0
    if batch.get("tool_mask") is not None:
        mask = mask & (batch["tool_mask"] != 0)
    sampled = batch["sampling_per_token_logps"]
    known = mask & ~torch.isnan(sampled)
    advantages = batch["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(mask.shape)
    result = correct_padded(
        correction,
        advantages=advantages,
        rollout_logp=sampled,
        learner_logp=batch["old_per_token_logps"],
        mask=known,
        segmenter=segmenter,
        delimiters=delimiters,
    )
    weights = torch.where(mask & ~known, 1.0, result.weights)
    weighed = torch.where(mask, advantages.float() * weights, 0.0)
    return CorrectedBatch(weighed, weights, result.metrics, result.correction)
