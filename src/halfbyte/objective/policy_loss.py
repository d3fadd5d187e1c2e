"""The policy loss: one pure function from flat tensors to a sum.

Three policies take part. mu (``rollout_logp``) sampled the tokens; the proximal policy (``old_logp``) is the learner
at the start of the step; pi (``logp``) is being trained. The decoupled objective (Hilton et al., arXiv 2110.00641)
clips pi against the proximal policy and leaves proximal / mu to the weights of a ``Correction``;
``proximal="rollout"`` uses pi / mu as the only ratio instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError
from halfbyte.objective.aggregate import Statistics, extreme_of, mean_of, total_of
from halfbyte.objective.correction import Correction
from halfbyte.objective.exponent import clamped_exp
from halfbyte.objective.kl import kl_estimate
from halfbyte.objective.policy_settings import PolicySettings
from halfbyte.objective.ratio import log_ratio
from halfbyte.objective.validation import require_finite, require_index, require_mask, require_real

__all__ = ["LossInput", "LossResult", "clipped_surrogate", "policy_loss", "require_compatible"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LossInput:
    """The tokens of one micro-batch. Only ``logp`` and ``entropy`` carry gradients; the rest is taken as constant.

    Arguments:
        logp: [T] float32, learner, current weights.
        advantages: [T] float32.
        mask: [T] bool, response tokens that count. Where it is false every other tensor may hold anything, NaN
            included.
        sequence_index: [T] int64.
        scale: [T] float32 >= 0, see ``token_scale``: the denominators of the global batch.
        old_logp: [T] float32, learner at the start of the step; None for a single strictly on-policy update, where it
            equals ``logp``.
        rollout_logp: [T] float32, needed if ``proximal`` is "rollout".
        weights: [T] float32 >= 0 of a correction, or None for 1.
        reference_logp: [T] float32, needed with a KL term.
        entropy: [T] float32 with gradient, needed with an entropy bonus.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        NumericsError: NaN or infinity on a token that counts (the message names it), or a negative scale or weight.
    """

    logp: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_index: Tensor
    scale: Tensor
    old_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    weights: Tensor | None = None
    reference_logp: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        require_mask("mask", self.mask)
        length = self.mask.shape[0]
        require_index("sequence_index", self.sequence_index, length, self.mask)
        for name in ("logp", "advantages", "scale", "old_logp", "rollout_logp", "weights", "reference_logp", "entropy"):
            values = getattr(self, name)
            if values is not None:
                require_real(name, values, length)
                require_finite(name, values, self.mask, self.sequence_index)
        for name in ("scale", "weights"):
            values = getattr(self, name)
            if values is not None and bool((values[self.mask] < 0).any()):
                raise NumericsError(
                    f"{name} has a negative value", where=name, expected="numbers >= 0: a sign would flip"
                )


@dataclass(frozen=True, eq=False)
class LossResult:
    """What :func:`policy_loss` returns.

    Arguments:
        loss: [] of the dtype of logp, the sum over the micro-batch, already divided by the step's denominators. Add
            the losses (or call ``backward`` on each) of all micro-batches; do not divide by their number.
        metrics: mergeable statistics of the tokens that count.
    """

    loss: Tensor
    metrics: Statistics


def policy_loss(tokens: LossInput, settings: PolicySettings) -> LossResult:
    """Sum over tokens of scale * (-weight * surrogate + kl_coefficient * kl - entropy_coefficient * entropy).

    The surrogate is PPO's min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (Schulman et al., arXiv 1707.06347, equation
    7; separate bounds: DAPO, arXiv 2503.14476, section 3.1), for A < 0 not below dual_clip * A (Ye et al., arXiv
    1912.09729, section "dual-clip PPO"). All of it is a bound on r that depends on the sign of A.

    Tokens that count are picked before any arithmetic: padding changes nothing, not even the last bit, and a NaN on a
    masked token reaches neither loss nor gradient (prime-rl #2084, NeMo RL #4120). Sums run in float64.

    Arguments:
        tokens: one micro-batch; whole sequences if the ratio is one per sequence.
        settings: the choices.

    Raises:
        ConfigError: the settings need a tensor that the record lacks.
    """
    mask = tokens.mask
    logp = tokens.logp[mask]
    advantages = tokens.advantages.detach()[mask]
    scale = tokens.scale.detach()[mask]
    weights = torch.ones_like(scale) if tokens.weights is None else tokens.weights.detach()[mask]
    everywhere = torch.ones_like(mask[mask])

    base = _base_logp(tokens, settings)
    # log_ratio takes the base as a constant, so without old log-probs the ratio is 1 and its gradient that of logp.
    base = logp if base is None else base[mask]
    difference = log_ratio(logp, base, everywhere, tokens.sequence_index[mask], settings.ratio)
    ratio = clamped_exp(difference)
    surrogate = clipped_surrogate(ratio, advantages, settings)
    policy = _scaled_sum(-weights * surrogate, scale)

    loss = policy
    metrics: Statistics = {"loss/policy": total_of(policy)}
    if settings.kl is not None:
        reference = _needed(tokens.reference_logp, "reference_logp", "a KL term")[mask]
        kl = kl_estimate(logp, reference, settings.kl)
        pushed = torch.ones_like(everywhere) if settings.kl_on_zero_advantage else advantages != 0
        term = settings.kl_coefficient * _scaled_sum(torch.where(pushed, kl, 0.0), scale)
        loss = loss + term
        metrics |= {"loss/kl": total_of(term), "reference/kl": mean_of(kl)}
    if settings.entropy_coefficient:
        entropy = _needed(tokens.entropy, "entropy", "an entropy bonus")[mask]
        term = -settings.entropy_coefficient * _scaled_sum(entropy, scale)
        loss = loss + term
        metrics |= {"loss/entropy": total_of(term)}
    metrics |= _ratio_metrics(difference.detach(), ratio.detach(), advantages, settings)
    metrics |= {"loss/total": total_of(loss), "weight/mean": mean_of(weights)}
    return LossResult(loss.to(logp.dtype), metrics)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: PolicySettings) -> Tensor:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), for A < 0 not below dual_clip * A; all [T]."""
    upper = torch.clamp(ratio, max=1.0 + settings.eps_high)
    lower = torch.clamp(ratio, min=1.0 - settings.eps_low, max=settings.dual_clip)
    return torch.where(advantages < 0, lower, upper) * advantages


def require_compatible(settings: PolicySettings, correction: Correction) -> None:
    """Refuse a correction by the ratio learner / rollout on top of a ratio that is taken against the rollout.

    Raises:
        ConfigError: both would correct the same mismatch.
    """
    if settings.proximal == "rollout" and correction.uses_ratio:
        raise ConfigError(
            f"correction {correction.name!r} with proximal='rollout' applies the ratio to the rollout twice",
            where="proximal, correction",
            expected="proximal='learner' with this correction, or correction 'none'",
        )


def _scaled_sum(terms: Tensor, scale: Tensor) -> Tensor:
    return (terms.double() * scale.double()).sum()


def _base_logp(tokens: LossInput, settings: PolicySettings) -> Tensor | None:
    if settings.proximal == "rollout":
        return _needed(tokens.rollout_logp, "rollout_logp", "proximal='rollout'")
    return tokens.old_logp


def _needed(values: Tensor | None, name: str, purpose: str) -> Tensor:
    if values is None:
        raise ConfigError(f"{purpose} needs {name}, which is missing", where=name, fix=f"pass {name} in LossInput")
    return values


def _ratio_metrics(difference: Tensor, ratio: Tensor, advantages: Tensor, settings: PolicySettings) -> Statistics:
    negative, positive = advantages < 0, advantages > 0
    dual = settings.dual_clip
    too_large = torch.zeros_like(negative) if dual is None else negative & (ratio > dual)
    return {
        "ratio/mean": mean_of(ratio),
        "ratio/max": extreme_of(ratio, "max"),
        "ratio/min": extreme_of(ratio, "min"),
        # Shares of all tokens whose gradient the bound removes.
        "ratio/clipped_low": mean_of(negative & (ratio < 1.0 - settings.eps_low)),
        "ratio/clipped_high": mean_of(positive & (ratio > 1.0 + settings.eps_high)),
        "ratio/clipped_dual": mean_of(too_large),
        # k3 of KL(base || pi): how far this step has moved.
        "ratio/kl": mean_of(kl_estimate(torch.zeros_like(difference), difference, "k3")),
    }
