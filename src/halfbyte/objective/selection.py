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
        alpha: false-discovery rate of the test of direction, in (0, 1]; 1 switches the test off.
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

    Beside E, z and I (arXiv 2610.07043 by our reconstruction) a test of direction of our own. Where noise without a preferred
    direction grows beyond the reference, E and z grow with it, and I exceeds any fixed threshold by chance in short
    segments. The null hypothesis is that each gap is as likely to have one sign as the other, whatever its size. A segment
    has to be a discovery of one of two procedures:

    - Benjamini and Hochberg (1995) on ``direction_p_value``, rate ``alpha``: strong in long segments, where one stands out;
    - mirrored counts: contraction, put through the same gates, shows how many segments pass by chance (the idea of Barber
      and Candes, Annals of Statistics 43, 2015). All k segments are discoveries if at most ``alpha`` k pass in the mirror
      and the two counts are further apart than fair coins would be in ``alpha / 10`` of batches: strong where many short
      segments agree.

    Arguments:
        reference: level and scale; None (no batch seen) finds nothing suspicious.
    """
    count = segments.count.shape[0]
    if reference is None or count == 0:
        return Suspicion(torch.zeros_like(segments.count), torch.zeros_like(segments.count, dtype=torch.bool))
    z = reference.z(segments.amplification, segments.count, gates.floor)
    gated = (segments.amplification > gates.e_min) & (z > gates.z_min) & (segments.imbalance > gates.i_min)
    if gates.alpha < 1.0:
        mirror = reference.z(segments.contraction, segments.count, gates.floor)
        mirrored = (segments.contraction > gates.e_min) & (mirror > gates.z_min) & (segments.imbalance < -gates.i_min)
        gated &= _discoveries(segments.direction, gates.alpha) | _outnumbers(gated.sum(), mirrored.sum(), gates.alpha)
    return Suspicion(z, gated)


def _outnumbers(here: Tensor, mirrored: Tensor, alpha: float) -> Tensor:
    """[] bool: ``here`` segments are more than chance explains, which gave ``mirrored`` on the other side."""
    lead = (here - mirrored) / (here + mirrored).clamp(min=1).double().sqrt()
    return (mirrored <= alpha * here) & (direction_p_value(lead) <= 0.1 * alpha)


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
