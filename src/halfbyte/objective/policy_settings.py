"""Choices of the policy loss, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from halfbyte.errors import ConfigError
from halfbyte.objective.kl import KlEstimator
from halfbyte.objective.ratio import RatioLevel

__all__ = ["PolicySettings", "Proximal"]

Proximal: TypeAlias = Literal["learner", "rollout"]


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """How tokens become a loss.

    Arguments:
        ratio: one ratio a token, or one a sequence by sum or by mean of log-ratios, see ``log_ratio``.
        proximal: what the ratio is taken against: "learner" (log-probs at the start of the step, the default; the
            mismatch to the rollout is left to a correction) or "rollout" (one ratio for everything).
        eps_low, eps_high: the ratio is clipped to [1 - eps_low, 1 + eps_high]; eps_low in [0, 1], eps_high >= 0.
            eps_low=1 and eps_high=inf switch clipping off.
        dual_clip: bound on the ratio where the advantage is negative, above 1; None for no bound. Only there does plain
            PPO let a ratio grow without limit.
        kl: estimator of the KL to the reference policy, or None for no such term.
        kl_coefficient: its factor, >= 0.
        kl_on_zero_advantage: also pull tokens whose advantage is exactly 0 to the reference. Off, a group without
            signal does not move the policy (TRL #7068); the denominators are the same either way.
        entropy_coefficient: factor of the entropy bonus, 0 for none.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    ratio: RatioLevel = "token"
    proximal: Proximal = "learner"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = 3.0
    kl: KlEstimator | None = None
    kl_coefficient: float = 0.0
    kl_on_zero_advantage: bool = False
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("ratio", self.ratio, get_args(RatioLevel)),
            ("proximal", self.proximal, get_args(Proximal)),
            ("kl", self.kl, (None, *get_args(KlEstimator))),
        ):
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}", where=name, expected=", ".join(map(str, choices)))
        for name, number, fits, expected in (
            ("eps_low", self.eps_low, 0.0 <= self.eps_low <= 1.0, "a number from 0 to 1"),
            ("eps_high", self.eps_high, self.eps_high >= 0.0, "a number >= 0, or infinity"),
            ("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1.0, "None or a number above 1"),
            ("kl_coefficient", self.kl_coefficient, 0.0 <= self.kl_coefficient < math.inf, "a number >= 0"),
            ("entropy_coefficient", self.entropy_coefficient, math.isfinite(self.entropy_coefficient), "a number"),
        ):
            if not fits:
                raise ConfigError(f"{name} is {number}", where=name, expected=expected)
        if (self.kl is None) != (self.kl_coefficient == 0.0):
            raise ConfigError(
                f"kl is {self.kl!r} with kl_coefficient {self.kl_coefficient}",
                where="kl, kl_coefficient",
                expected="an estimator and a positive coefficient, or neither",
            )
