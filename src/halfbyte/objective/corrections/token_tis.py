"""Truncated importance sampling, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from halfbyte.errors import ConfigError
from halfbyte.objective.aggregate import extreme_of, mean_of
from halfbyte.objective.correction import CorrectionInput, CorrectionResult
from halfbyte.objective.exponent import clamped_exp

__all__ = ["TokenTis"]


@dataclass(frozen=True)
class TokenTis:
    """Weight min(exp(g), cap): learner over rollout, cut at the top.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025,
    https://fengyao.notion.site/off-policy-rl), who truncate the ratio of the learner's proximal policy to the sampler;
    verl has it as "rollout correction", token level, upper threshold 2. Truncation as such: Ionides 2008. There is no
    lower cut and nothing is rejected.

    Arguments:
        cap: largest weight, at least 1, so that a token without a gap keeps weight exactly 1.

    Raises:
        ConfigError: cap is below 1 or not finite.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.cap < math.inf):
            raise ConfigError(
                f"cap is {self.cap}", where="token_tis", expected="a finite number >= 1", fix="the usual value is 2"
            )

    @property
    def name(self) -> str:
        """Registry name."""
        return "token_tis"

    @property
    def uses_ratio(self) -> bool:
        """The weights are the (truncated) ratio."""
        return True

    @torch.no_grad()
    def __call__(self, tokens: CorrectionInput) -> CorrectionResult:
        """See :class:`halfbyte.objective.correction.Correction`.

        Metrics: mean and largest weight, mean raw ratio (weight over ratio is the mass kept), share of tokens cut.
        """
        raw = clamped_exp(tokens.gap[tokens.mask].float())
        cut = torch.clamp(raw, max=self.cap)
        weights = torch.zeros_like(tokens.gap, dtype=torch.float32).masked_scatter(tokens.mask, cut)
        metrics = {
            "correction/weight_mean": mean_of(cut),
            "correction/weight_max": extreme_of(cut, "max"),
            "correction/ratio_mean": mean_of(raw),
            "correction/cut_share": mean_of(raw > self.cap),
        }
        return CorrectionResult(weights, torch.zeros_like(tokens.mask), metrics)
