"""DPPO: a trust region in probability, not in ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.corrections.weighing import real_gap, refuse, result
from halfbyte.objective.exponent import clamped_exp

__all__ = ["DppoKl", "DppoTv"]


@dataclass(frozen=True)
class DppoTv:
    """Weight exp(g); a token is rejected where its update leads further away and |pi - mu| > delta already.

    Away: A > 0 with exp(g) > 1, or A < 0 with exp(g) < 1. pi and mu are the probabilities of the sampled token in learner
    and rollout, the binary approximation of the total variation.

    Source: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879, equations 11-13). There
    pi moves with the policy; here it is the learner at the start of the step.

    Arguments:
        delta: in (0, 1].

    Raises:
        ConfigError: delta is out of range; when called: ``rollout_logp`` is missing.
    """

    name: ClassVar[str] = "dppo_tv"
    uses_ratio: ClassVar[bool] = True
    delta: float = 0.15

    def __post_init__(self) -> None:
        refuse(self.name, {"delta": (self.delta, 0.0 < self.delta <= 1.0, "0 < delta <= 1")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        rollout, learner = _log_probs(tokens, self.name)
        return _masked(tokens, (learner.exp() - rollout.exp()).abs() > self.delta)


@dataclass(frozen=True)
class DppoKl:
    """As ``DppoTv`` with the binary KL: mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) > delta.

    Source: as above, equation 14.

    Arguments:
        delta: nats > 0.

    Raises:
        ConfigError: delta is out of range; when called: ``rollout_logp`` is missing.
    """

    name: ClassVar[str] = "dppo_kl"
    uses_ratio: ClassVar[bool] = True
    delta: float = 0.05

    def __post_init__(self) -> None:
        refuse(self.name, {"delta": (self.delta, 0.0 < self.delta < math.inf, "nats > 0")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        rollout, learner = _log_probs(tokens, self.name)
        others = [torch.log(-torch.expm1(logp)) for logp in (rollout, learner)]
        kl = rollout.exp() * (rollout - learner) + others[0].exp() * (others[0] - others[1])
        return _masked(tokens, kl > self.delta)


def _log_probs(tokens: CorrectionInput, rule: str) -> tuple[Tensor, Tensor]:
    """[N] float64 log-probs of rollout and learner, below 0 by at least 1e-9 so that 1 - p never vanishes."""
    if tokens.rollout_logp is None:
        raise ConfigError(
            f"correction {rule!r} needs rollout_logp", where="rollout_logp", fix="pass it in CorrectionInput"
        )
    rollout = tokens.rollout_logp[tokens.mask].double()
    learner = rollout + tokens.gap[tokens.mask].double()
    return rollout.clamp(max=-1e-9), learner.clamp(max=-1e-9)


def _masked(tokens: CorrectionInput, far: Tensor) -> CorrectionResult:
    gap = real_gap(tokens)
    away = tokens.advantages[tokens.mask] * gap.sign() > 0
    ratio = clamped_exp(gap)
    return result(tokens, ratio, far & away, ratio)
