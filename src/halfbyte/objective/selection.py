"""Which segments are suspicious, and which of those are selected within the token budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.reference import Reference
from halfbyte.objective.segment_statistics import SegmentStatistics

__all__ = ["Gates", "Suspicion", "direction_p_value", "select_within", "suspicion"]


@dataclass(frozen=True)
class Gates:
    """What a segment must exceed to be suspicious; all of them.

    Arguments:
        e_min: nats, of the amplification E.
        z_min: of z, the excess over the healthy reference in its standard deviations.
        i_min: of the imbalance I, in [0, 1).
        alpha: false-discovery rate of the direction test, in (0, 1]; 1 switches the test off.
        floor: nats, smallest scale that z divides by.

    Raises:
        ConfigError: a value is out of range.
    """

    e_min: float = 0.03
    z_min: float = 3.0
    i_min: float = 0.2
    alpha: float = 0.1
    floor: float = 0.02

    def __post_init__(self) -> None:
        for name, value, fits, expected in (
            ("e_min", self.e_min, 0.0 <= self.e_min < math.inf, "nats >= 0"),
            ("z_min", self.z_min, math.isfinite(self.z_min), "a number"),
            ("i_min", self.i_min, 0.0 <= self.i_min < 1.0, "0 <= i_min < 1"),
            ("alpha", self.alpha, 0.0 < self.alpha <= 1.0, "0 < alpha <= 1 (1 is off)"),
            ("floor", self.floor, 0.0 < self.floor < math.inf, "nats > 0"),
        ):
            if not fits:
                raise ConfigError(f"{name} is {value}", where=name, expected=expected)


@dataclass(frozen=True, eq=False)
class Suspicion:
    """Verdict on each segment: z [S] float32, and suspicious [S] bool."""

    z: Tensor
    suspicious: Tensor


def suspicion(segments: SegmentStatistics, reference: Reference | None, gates: Gates) -> Suspicion:
    """Apply the gates.

    Beside E, z and I (arXiv 2610.07043 by our reconstruction) a direction test of our own: among segments of noise
    without a preferred direction, however large, I exceeds any fixed threshold by chance in short ones. Benjamini and
    Hochberg (1995) on ``direction_p_value`` keeps the expected share of such segments below ``alpha``, and the chance of any
    below ``alpha`` when there is nothing else.

    Arguments:
        reference: level and scale; None (no batch seen) finds nothing suspicious.
    """
    count = segments.count.shape[0]
    if reference is None or count == 0:
        return Suspicion(torch.zeros_like(segments.count), torch.zeros_like(segments.count, dtype=torch.bool))
    z = reference.z(segments.amplification, segments.count, gates.floor)
    gated = (segments.amplification > gates.e_min) & (z > gates.z_min) & (segments.imbalance > gates.i_min)
    if gates.alpha < 1.0:
        gated &= _discoveries(segments.direction, gates.alpha)
    return Suspicion(z, gated)


def _discoveries(t: Tensor, alpha: float) -> Tensor:
    """Benjamini-Hochberg over the segments; [S] bool."""
    p = direction_p_value(t)
    ordered = p.sort().values
    ranks = torch.arange(1, p.shape[0] + 1, dtype=p.dtype, device=p.device)
    passing = torch.nonzero(ordered <= alpha * ranks / p.shape[0])[:, 0]
    return p <= ordered[passing[-1]] if passing.numel() else torch.zeros_like(p, dtype=torch.bool)


def direction_p_value(t: Tensor) -> Tensor:
    """Bound on the chance that a weighted sum of random signs, squared weights adding up to 1, reaches t.

    The smaller of exp(-t^2 / 2) (Hoeffding 1963) and 3.179 P(Z >= t) for a standard normal Z (Bentkus and Dzindzalieta,
    Bernoulli 21, 2015); 1 for t <= 0.

    Arguments:
        t: [S]. Returns [S] float64.
    """
    t = t.double().clamp(min=0)
    normal = 0.5 * torch.erfc(t / math.sqrt(2.0))
    return torch.minimum(torch.exp(-0.5 * t.square()), 3.179 * normal)


def select_within(score: Tensor, suspicious: Tensor, count: Tensor, budget: float) -> Tensor:
    """Suspicious segments with the highest scores whose tokens together fit the budget.

    Arguments:
        score: [S] float32. suspicious: [S] bool. count: [S] float32, tokens. budget: tokens.

    Returns:
        [S] bool. Segments of equal score are taken together or not at all, so the order of segments does not matter.
    """
    levels, level = torch.unique(score[suspicious], return_inverse=True)
    tokens = torch.zeros_like(levels, dtype=torch.float64).index_add_(0, level, count[suspicious].double())
    from_top = tokens.flip(0).cumsum(0).flip(0)
    out = torch.zeros_like(suspicious)
    out[suspicious] = (from_top <= budget)[level]
    return out
