"""Corrections and the policy loss inside verl. Plain functions on its tensors; verl is imported only to share its denominators.

Two places to plug in:

- weights: ``batch["rollout_is_weights"] = rollout_weights(batch, correction).weights`` on the whole batch, after old
  log-probs and advantages are known; verl's policy losses multiply by that tensor.
- loss: ``register_policy_loss("halfbyte")(make_policy_loss(PolicySettings()))``, then
  ``actor_rollout_ref.actor.policy_loss.loss_mode=halfbyte``.

``examples/verl_triage.py`` does both. Written against verl 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import DataError, MissingExtraError
from halfbyte.objective.correction import Correction
from halfbyte.objective.exponent import clamped_exp
from halfbyte.objective.padded import PaddedResult, correct_padded
from halfbyte.objective.policy_loss import clipped_surrogate
from halfbyte.objective.policy_settings import PolicySettings
from halfbyte.objective.ratio import log_ratio
from halfbyte.objective.segments import Segmenter

__all__ = ["make_policy_loss", "rollout_weights"]

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]


def rollout_weights(
    batch: Mapping[str, Any],
    correction: Correction,
    *,
    segmenter: Segmenter | None = None,
    delimiters: Tensor | None = None,
) -> PaddedResult:
    """Weights of a whole batch, to be stored as ``rollout_is_weights``.

    Arguments:
        batch: ``rollout_log_probs``, ``old_log_probs``, ``advantages`` and ``response_mask``, all [B, T]
            (``DataProto.batch`` has them when ``calculate_log_probs`` is on for the rollout).
        correction, segmenter, delimiters: see ``correct_padded``.

    Raises:
        DataError: a tensor is missing.
    """
    for key in ("rollout_log_probs", "old_log_probs", "advantages", "response_mask"):
        if batch.get(key) is None:
            raise DataError(
                f"the batch has no {key}",
                where="verl batch",
                expected="log-probs of both sides, advantages and mask",
                fix="set actor_rollout_ref.rollout.calculate_log_probs=True" if key == "rollout_log_probs" else "",
            )
    return correct_padded(
        correction,
        advantages=batch["advantages"],
        rollout_logp=batch["rollout_log_probs"],
        learner_logp=batch["old_log_probs"],
        mask=batch["response_mask"],
        segmenter=segmenter,
        delimiters=delimiters,
    )


def make_policy_loss(settings: PolicySettings) -> PolicyLoss:
    """A function for verl's policy-loss registry: our surrogate, verl's aggregation.

    The surrogate is that of ``policy_loss``: ratio by token or sequence, clipping, dual clip, weights; masked tokens
    are left out before any arithmetic, so a NaN in the padding reaches neither loss nor gradient. Clip bounds come from
    ``settings``, not from verl's configuration.

    Arguments:
        settings: ``proximal="learner"``; KL and entropy terms are verl's business.
    """

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """[B, T] tensors of a micro-batch -> (loss, metrics)."""
        aggregate = _agg_loss()
        mask = (response_mask != 0).reshape(-1)
        row = torch.arange(response_mask.shape[0], device=mask.device).repeat_interleave(response_mask.shape[1])
        flat = log_prob.reshape(-1)
        difference = log_ratio(flat, old_log_prob.reshape(-1), mask, row, settings.ratio)[mask]
        ratio = clamped_exp(difference)
        sign = advantages.detach().reshape(-1)[mask]
        surrogate = clipped_surrogate(ratio, sign, settings)
        if rollout_is_weights is not None:
            surrogate = surrogate * rollout_is_weights.detach().reshape(-1)[mask]
        terms = torch.zeros_like(flat).masked_scatter(mask, -surrogate.to(flat.dtype)).view(log_prob.shape)
        info = {} if config is None else dict(config.global_batch_info)
        value = aggregate(loss_mat=terms, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **info)
        with torch.no_grad():
            low = (sign < 0) & (ratio < 1.0 - settings.eps_low)
            high = (sign > 0) & (ratio > 1.0 + settings.eps_high)
            metrics = {
                "actor/pg_clipfrac": _mean((low | high).float()),
                "actor/ppo_kl": _mean(-difference),
                "actor/pg_clipfrac_lower": _mean(
                    ((sign < 0) & (ratio > settings.dual_clip)).float() if settings.dual_clip else sign[:0]
                ),
            }
        return value, metrics

    return loss


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def _agg_loss() -> Callable[..., Tensor]:
    try:
        from verl.trainer.ppo.core_algos import agg_loss
    except ImportError as error:
        raise MissingExtraError(
            "this loss shares verl's denominators, and verl cannot be imported",
            where="halfbyte.objective.verl",
            fix="pip install verl",
        ) from error
    found: Callable[..., Tensor] = agg_loss
    return found
