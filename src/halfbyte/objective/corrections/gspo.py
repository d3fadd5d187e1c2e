"""GSPO: one length-normalised ratio a response, clipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.corrections.weighing import refuse, result, sequence_gap
from halfbyte.objective.exponent import clamped_exp

__all__ = ["Gspo"]


@dataclass(frozen=True)
class Gspo:
    """Weight s = exp(mean of g over the response); rejected where the clipped objective has no gradient.

    That is where s > 1 + eps_high with A > 0, or s < 1 - eps_low with A < 0.

    Source: Zheng et al. (arXiv 2507.18071, equations 5-10; clip range 3e-4 and 4e-4, section 5.1). There s moves with the
    policy; here it is taken once a step between learner and rollout, so the gradient is theirs at the start of the step
    (with ``objective.denominator = "sequence_mean"``).

    Arguments:
        eps_low: in [0, 1]. eps_high: >= 0.

    Raises:
        ConfigError: a value is out of range.
    """

    name: ClassVar[str] = "gspo"
    uses_ratio: ClassVar[bool] = True
    eps_low: float = 3e-4
    eps_high: float = 4e-4

    def __post_init__(self) -> None:
        low = (self.eps_low, 0.0 <= self.eps_low <= 1.0, "a number from 0 to 1")
        refuse(
            self.name, {"eps_low": low, "eps_high": (self.eps_high, 0.0 <= self.eps_high < math.inf, "a number >= 0")}
        )

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        ratio = clamped_exp(sequence_gap(tokens, mean=True))
        advantages = tokens.advantages[tokens.mask]
        too_high = (advantages > 0) & (ratio > 1.0 + self.eps_high)
        return result(tokens, ratio, too_high | ((advantages < 0) & (ratio < 1.0 - self.eps_low)), ratio)
