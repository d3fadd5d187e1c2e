"""CISPO: the ratio is clipped, the token is not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.corrections.weighing import real_gap, refuse, result
from halfbyte.objective.exponent import clamped_exp

__all__ = ["Cispo"]


@dataclass(frozen=True)
class Cispo:
    """Weight clip(exp(g), low, high); no token loses its gradient.

    Source: MiniMax-M1 (arXiv 2506.13585, equations 4 and 5), which sets no lower bound and states no upper one; 5 is the
    value that TRL gives for ScaleRL (arXiv 2510.13786). There the ratio moves with the policy; here it is taken once a
    step between learner and rollout, so the gradient is theirs at the start of the step.

    Arguments:
        low: 1 - eps_low, in [0, 1]. high: 1 + eps_high, >= 1.

    Raises:
        ConfigError: a bound is out of range.
    """

    name: ClassVar[str] = "cispo"
    uses_ratio: ClassVar[bool] = True
    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        low = (self.low, 0.0 <= self.low <= 1.0, "a number from 0 to 1")
        refuse(self.name, {"low": low, "high": (self.high, 1.0 <= self.high < math.inf, "a finite number >= 1")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        ratio = clamped_exp(real_gap(tokens))
        return result(tokens, ratio.clamp(self.low, self.high), torch.zeros_like(ratio, dtype=torch.bool), ratio)
