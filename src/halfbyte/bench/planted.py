"""Planted damage: gaps with clusters of amplifying updates at known places, to measure what finds them.

Negative-advantage responses get clusters of 20-60 tokens whose gaps are pushed down (the update amplifies them), and decoys
that are as large but harmless: clusters pushed up (the update contracts them) and clusters of undirected noise five times the
normal. What selects by size alone takes the decoys; what selects single tokens takes the tail of the noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.objective import CorrectionInput, SegmentInput

__all__ = ["SCENARIOS", "Batch", "Scenario", "plant"]


@dataclass(frozen=True)
class Scenario:
    """How a batch is made.

    Arguments:
        name: for tables.
        prevalence: share of the negative-advantage tokens inside damaged clusters.
        density: chance that a token of a cluster is damaged.
        damage: nats, mean push of a damaged token (exponentially distributed).
        noise: nats, standard deviation of the gaps (scale for heavy tails).
        tail: degrees of freedom of Student's t; 0 for normal noise.
        decoys: share of the negative-advantage tokens inside decoy clusters, half of either kind.
    """

    name: str
    prevalence: float = 0.1
    density: float = 0.7
    damage: float = 0.3
    noise: float = 0.08
    tail: float = 0.0
    decoys: float = 0.1


SCENARIOS = (
    Scenario("density 1.0", density=1.0),
    Scenario("density 0.7"),
    Scenario("density 0.4", density=0.4),
    Scenario("sparse 2%", prevalence=0.02),
    Scenario("heavy tails", tail=3.0, noise=0.05),
    Scenario("heavy tails, density 0.4", tail=3.0, noise=0.05, density=0.4),
    Scenario("5x noise", noise=0.4),
    Scenario("5x noise, heavy tails", noise=0.25, tail=3.0),
    Scenario("50% damaged", prevalence=0.5),
    Scenario("90% damaged", prevalence=0.9, decoys=0.0),
    Scenario("null", prevalence=0.0, decoys=0.0),
    Scenario("null, decoys", prevalence=0.0, decoys=0.2),
    Scenario("null, heavy tails", prevalence=0.0, decoys=0.0, tail=3.0, noise=0.05),
    Scenario("null, 5x noise", prevalence=0.0, decoys=0.0, noise=0.4),
    Scenario("null, 5x noise, heavy tails", prevalence=0.0, decoys=0.0, noise=0.25, tail=3.0),
)
"""Damage first, then batches without any."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch with known damage.

    Arguments:
        tokens: what a correction sees, without segments. layout: what a segmenter sees.
        damaged: [T] bool, tokens inside damaged clusters. push: [T] float32 >= 0, nats that damage took from each gap.
    """

    tokens: CorrectionInput
    layout: SegmentInput
    damaged: Tensor
    push: Tensor


def plant(scenario: Scenario, seed: int, *, samples: int = 64, length: int = 512) -> Batch:
    """Draw a batch: half of the samples have A < 0; sentences of 5-40 tokens end in a delimiter.

    Arguments:
        seed: of everything in it.
    """
    random = torch.Generator().manual_seed(seed)
    total = samples * length
    sequence = torch.arange(samples).repeat_interleave(length)
    advantages = torch.where(torch.arange(samples) % 2 == 0, 1.0, -1.0) * (0.5 + torch.rand(samples, generator=random))
    gap = scenario.noise * _noise(total, scenario.tail, random)
    damaged, push = torch.zeros(total, dtype=torch.bool), torch.zeros(total)
    free = torch.ones(total, dtype=torch.bool)
    negative = samples // 2 * length
    for first, size in _clusters(round(scenario.prevalence * negative), free, samples, length, random):
        place = slice(first, first + size)
        hit = torch.rand(size, generator=random) < scenario.density
        damaged[place] = True
        push[place] = torch.where(hit, -scenario.damage * torch.rand(size, generator=random).clamp(min=1e-7).log(), 0.0)
    for index, (first, size) in enumerate(_clusters(round(scenario.decoys * negative), free, samples, length, random)):
        place = slice(first, first + size)
        if index % 2:
            gap[place] += -scenario.damage * torch.rand(size, generator=random).clamp(min=1e-7).log()
        else:
            gap[place] *= 5.0
    tokens = CorrectionInput(
        gap=gap - push,
        advantages=advantages[sequence],
        mask=torch.ones(total, dtype=torch.bool),
        sequence_index=sequence,
    )
    layout = SegmentInput(
        mask=tokens.mask,
        sequence_index=sequence,
        delimiters=_sentence_ends(total, random),
        gap=tokens.gap,
        advantages=tokens.advantages,
    )
    return Batch(tokens, layout, damaged, push)


def _noise(total: int, tail: float, random: torch.Generator) -> Tensor:
    normal = torch.randn(total, generator=random)
    if tail == 0.0:
        return normal
    # Student's t with an integer number of degrees of freedom: normal over the root of a mean of squares.
    squares = torch.randn(int(tail), total, generator=random).square().mean(0)
    return normal / squares.sqrt()


def _clusters(
    wanted: int, free: Tensor, samples: int, length: int, random: torch.Generator
) -> Iterator[tuple[int, int]]:
    """First place and size of clusters in negative-advantage samples until about ``wanted`` tokens are covered."""
    covered = tries = 0
    while covered < wanted and tries < 200 * samples:
        tries += 1
        size = int(torch.randint(20, 61, (1,), generator=random))
        sample = 1 + 2 * int(torch.randint(samples // 2, (1,), generator=random))
        first = sample * length + int(torch.randint(length - size + 1, (1,), generator=random))
        if bool(free[first : first + size].all()):
            free[first : first + size] = False
            covered += size
            yield first, size


def _sentence_ends(total: int, random: torch.Generator) -> Tensor:
    lengths = torch.randint(5, 41, (total // 5 + 1,), generator=random)
    ends = lengths.cumsum(0) - 1
    out = torch.zeros(total, dtype=torch.bool)
    out[ends[ends < total]] = True
    return out
