"""McNemar's test of equal pass rates on the same tasks (Psychometrika 12, 1947), exact."""

from __future__ import annotations

import math

from halfbyte.statistics.special import binomial_tail

__all__ = ["mcnemar"]


def mcnemar(gains: int, losses: int, *, mid: bool = False) -> float:
    """Two-sided p-value: given the flips, gains are Binomial(gains + losses, 1/2) if the arms are equal. 1 without a flip.

    Arguments:
        mid: count half of the observed table (mid-p: nearer to the level, no guarantee; Fagerland, Lydersen and Laake, BMC
            Medical Research Methodology 13, 2013).
    """
    flips, least = gains + losses, min(gains, losses)
    if gains < 0 or losses < 0:
        raise ValueError(f"{gains} gains and {losses} losses")
    p = 2 * float(binomial_tail(flips - least, flips, 0.5))
    if mid:
        p -= math.exp(
            math.lgamma(flips + 1) - math.lgamma(least + 1) - math.lgamma(flips - least + 1) - flips * math.log(2)
        )
    return min(1.0, p)
