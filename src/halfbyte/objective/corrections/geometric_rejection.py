"""Rejection of responses by the geometric mean of their token ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.corrections.weighing import refuse, result, sequence_gap
from halfbyte.objective.exponent import clamped_exp

__all__ = ["GeometricRejection"]


@dataclass(frozen=True)
class GeometricRejection:
    """Reject responses whose exp(mean g) is outside [low, high]; all others keep weight 1.

    Source: Li et al., "Trust Region Masking" (arXiv 2512.23075) and "When Math Meets Reality" (2025,
    https://richardli.xyz/rl-collapse): geometric-level rejection sampling; 0.999 and 1.001 as in verl's presets.

    Arguments:
        low: in [0, 1]. high: >= 1.

    Raises:
        ConfigError: a bound is out of range.
    """

    name: ClassVar[str] = "geometric_rejection"
    uses_ratio: ClassVar[bool] = False
    low: float = 0.999
    high: float = 1.001

    def __post_init__(self) -> None:
        low = (self.low, 0.0 <= self.low <= 1.0, "a number from 0 to 1")
        refuse(self.name, {"low": low, "high": (self.high, 1.0 <= self.high < math.inf, "a finite number >= 1")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        ratio = clamped_exp(sequence_gap(tokens, mean=True))
        return result(tokens, torch.ones_like(ratio), (ratio < self.low) | (ratio > self.high))
