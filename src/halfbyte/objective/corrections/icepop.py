"""IcePop: masked importance sampling, token by token, with a bound on either side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.corrections.weighing import real_gap, refuse, result
from halfbyte.objective.exponent import clamped_exp

__all__ = ["IcePop"]


@dataclass(frozen=True)
class IcePop:
    """Weight exp(g) inside [low, high]; a token outside is rejected.

    Source: Ling team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (arXiv
    2510.18855, IcePop; alpha 0.5, beta 5). low=0, high=2 is the token-level masked importance sampling of Liu et al.
    ("When Speed Kills Stability", 2025).

    Arguments:
        low: alpha, in [0, 1]. high: beta, >= 1.

    Raises:
        ConfigError: a bound is out of range.
    """

    name: ClassVar[str] = "icepop"
    uses_ratio: ClassVar[bool] = True
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        low = (self.low, 0.0 <= self.low <= 1.0, "a number from 0 to 1")
        refuse(self.name, {"low": low, "high": (self.high, 1.0 <= self.high < math.inf, "a finite number >= 1")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        ratio = clamped_exp(real_gap(tokens))
        return result(tokens, ratio, (ratio < self.low) | (ratio > self.high), ratio)
