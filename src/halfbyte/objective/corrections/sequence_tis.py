"""Importance sampling with one ratio a response: truncated, or masked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.corrections.weighing import refuse, result, sequence_gap
from halfbyte.objective.exponent import clamped_exp

__all__ = ["SequenceMis", "SequenceTis"]


@dataclass(frozen=True)
class SequenceTis:
    """Weight min(exp(sum of g over the response), cap) for each of its tokens.

    Source: Liu et al., "When Speed Kills Stability" (2025, https://richardli.xyz/rl-collapse), sequence-level truncated
    importance sampling; threshold 2, the default of verl's rollout correction.

    Arguments:
        cap: largest weight, >= 1.

    Raises:
        ConfigError: cap is below 1 or not finite.
    """

    name: ClassVar[str] = "sequence_tis"
    uses_ratio: ClassVar[bool] = True
    cap: float = 2.0

    def __post_init__(self) -> None:
        refuse(self.name, {"cap": (self.cap, 1.0 <= self.cap < math.inf, "a finite number >= 1")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        ratio = clamped_exp(sequence_gap(tokens, mean=False))
        return result(tokens, ratio.clamp(max=self.cap), torch.zeros_like(ratio, dtype=torch.bool), ratio)


@dataclass(frozen=True)
class SequenceMis:
    """Weight exp(sum of g over the response); a response where it exceeds the cap is rejected.

    Source: Liu et al., as above, sequence-level masked importance sampling; threshold 2, the default of verl's rollout
    correction.

    Arguments:
        cap: largest weight that is kept, >= 1.

    Raises:
        ConfigError: cap is below 1 or not finite.
    """

    name: ClassVar[str] = "sequence_mis"
    uses_ratio: ClassVar[bool] = True
    cap: float = 2.0

    def __post_init__(self) -> None:
        refuse(self.name, {"cap": (self.cap, 1.0 <= self.cap < math.inf, "a finite number >= 1")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        ratio = clamped_exp(sequence_gap(tokens, mean=False))
        return result(tokens, ratio, ratio > self.cap, ratio)
