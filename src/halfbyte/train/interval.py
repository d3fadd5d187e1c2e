"""A confidence interval for an accuracy that stays honest at 0 and 1 (Wilson, JASA 1927)."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["accuracy_interval", "wilson"]

Z95 = 1.959963984540054


def wilson(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a proportion; (0, 1) without observations. ``n`` may be an effective sample size."""
    if n <= 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes <= 0 else max(0.0, centre - half)  # the ends are exact; rounding would miss them
    high = 1.0 if successes >= n else min(1.0, centre + half)
    return low, high


def accuracy_interval(correct: Sequence[Sequence[bool]]) -> tuple[float, float, float]:
    """Accuracy and its 95% interval from ``correct[prompt][sample]``.

    Samples of one prompt are not independent: the number of observations is divided by the design effect (variance of prompt
    means over what independent samples would have), at least 1 and at most the samples a prompt. Where nothing varies the
    design effect cannot be seen, and the number of prompts is taken.

    Returns:
        (accuracy, low, high).
    """
    groups = [g for g in correct if g]
    total = sum(map(len, groups))
    if total == 0:
        return 0.0, 0.0, 1.0
    p = sum(map(sum, groups)) / total
    per_prompt = total / len(groups)
    effect = per_prompt
    if 0.0 < p < 1.0 and len(groups) > 1 and per_prompt > 1:
        spread = sum((sum(g) / len(g) - p) ** 2 for g in groups) / (len(groups) - 1)
        effect = min(per_prompt, max(1.0, spread / (p * (1 - p) / per_prompt)))
    n = total / effect
    low, high = wilson(p * n, n)
    return p, low, high
