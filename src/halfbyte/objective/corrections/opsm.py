"""Off-policy sequence masking: bad responses that the learner would not have given are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.corrections.weighing import refuse, result, sequence_gap

__all__ = ["Opsm"]


@dataclass(frozen=True)
class Opsm:
    """Reject negative-advantage tokens of responses with mean log(rollout / learner) > delta; all others keep weight 1.

    Source: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1, "off-policy sequence masking"), where the mean is taken against
    the policy being trained; here once a step, against the learner at its start. The paper states no delta. 1e-4 is
    slime's default; TRL suggests 0.5.

    Arguments:
        delta: nats a token, >= 0.

    Raises:
        ConfigError: delta is negative or not finite.
    """

    name: ClassVar[str] = "opsm"
    uses_ratio: ClassVar[bool] = False
    delta: float = 1e-4

    def __post_init__(self) -> None:
        refuse(self.name, {"delta": (self.delta, 0.0 <= self.delta < math.inf, "nats >= 0")})

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`."""
        away = -sequence_gap(tokens, mean=True) > self.delta
        return result(tokens, torch.ones_like(away, dtype=torch.float32), away & (tokens.advantages[tokens.mask] < 0))
