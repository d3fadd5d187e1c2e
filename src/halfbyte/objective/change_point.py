"""Segments from the gaps themselves: where the mismatch starts and stops to amplify."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.runs import Runs, SegmentInput, block_begins, find_runs, label
from halfbyte.objective.scale import gap_scale

__all__ = ["ChangePoint"]

# Evidence is rounded to this fraction, so that sums of it are exact in float32 and the scan has one result.
_STEP = 1.0 / 64.0


@dataclass(frozen=True)
class ChangePoint:
    """Pieces in which the signed gap d = sign(A) g is mostly positive, mostly negative, or neither.

    The states s of a run maximise sum over s_t = 1 of (clip(d_t / scale, -clip, clip) - drift) - penalty * switches (Viterbi
    for two states, solved exactly by a scan over compositions of clamps); scale is ``gap_scale``. This is done for d and for
    -d, so that no direction is preferred. Pieces longer than ``size`` are cut into blocks.

    Since borders and diagnosis use the same gaps, segments look more one-sided than chance alone would make them.

    Arguments:
        drift: in units of scale, > 0. penalty: same units, > 0. clip: same units, > drift.
        size: tokens of a block, >= 1. floor: nats > 0, smallest scale.

    Raises:
        ConfigError: a value is out of range; when called: the batch has no gap or advantages.
    """

    drift: float = 0.5
    penalty: float = 4.0
    clip: float = 3.0
    size: int = 32
    floor: float = 0.02

    def __post_init__(self) -> None:
        for name, value, good, expected in (
            ("drift", self.drift, 0.0 < self.drift < math.inf, "a number > 0"),
            ("penalty", self.penalty, 0.0 < self.penalty < math.inf, "a number > 0"),
            ("clip", self.clip, self.drift < self.clip < math.inf, "a number > drift"),
            ("size", self.size, self.size >= 1, "an integer >= 1"),
            ("floor", self.floor, 0.0 < self.floor < math.inf, "nats > 0"),
        ):
            if not good:
                raise ConfigError(f"{name} is {value}", where=f"change_point.{name}", expected=expected)

    @property
    def name(self) -> str:
        """Registry name."""
        return "change_point"

    @torch.no_grad()
    def __call__(self, tokens: SegmentInput) -> Tensor:
        """See :class:`halfbyte.objective.segments.Segmenter`."""
        if tokens.gap is None or tokens.advantages is None:
            raise ConfigError("segmenter 'change_point' needs gap and advantages", where="gap, advantages")
        runs = find_runs(tokens)
        if runs.order.numel() == 0:
            return torch.full_like(tokens.sequence_index, -1)
        state = self.states(runs, tokens.gap[runs.order].float() * tokens.advantages[runs.order].float().sign())
        places = torch.arange(state.shape[0], device=state.device)
        begins = places == runs.start
        begins[1:] |= state[1:] != state[:-1]
        starts = torch.nonzero(begins)[:, 0]
        piece = begins.to(torch.int64).cumsum(0) - 1
        ends = torch.cat([starts[1:], starts.new_tensor([state.shape[0]])])
        return label(tokens, runs, begins | block_begins(places, starts[piece], ends[piece], self.size))

    def states(self, runs: Runs, signed: Tensor) -> Tensor:
        """[N] int64: 1 where updates amplify, -1 where they contract, else 0, in the order of ``runs``.

        Arguments:
            signed: [N] float32, d.
        """
        scaled = (signed / gap_scale(signed, self.floor)).clamp(-self.clip, self.clip)
        return self._positive(runs, scaled).to(torch.int64) - self._positive(runs, -scaled).to(torch.int64)

    def _positive(self, runs: Runs, scaled: Tensor) -> Tensor:
        """[N] bool: the better state of each token."""
        evidence = scaled - self.drift
        evidence = (evidence / _STEP).round() * _STEP
        penalty = max(round(self.penalty / _STEP), 1) * _STEP
        lead = _lead(evidence, penalty, runs)
        places = torch.arange(scaled.shape[0], device=scaled.device)
        last = places == runs.end - 1
        decided = last | (lead.abs() > penalty)
        following = torch.where(decided, places, scaled.shape[0]).flip(0).cummin(0).values.flip(0)
        return (lead > 0)[following]


def _lead(evidence: Tensor, penalty: float, runs: Runs) -> Tensor:
    """[N] float32: M_t = x_t + clamp(M_{t-1}, -penalty, penalty), from 0 at the start of each run.

    M is the score of the best path that ends in state 1 less that of the best one that ends in state 0. Each step is a
    function m -> clamp(m + a, low, high), and such functions compose to one of the same kind: log2(longest run) rounds.
    """
    places = torch.arange(evidence.shape[0], device=evidence.device)
    first = places == runs.start
    a = torch.where(first, 0.0, evidence)
    low = torch.where(first, evidence, evidence - penalty)
    high = torch.where(first, evidence, evidence + penalty)
    longest = int((runs.end - runs.start).max())
    reach = 1
    while reach < longest:
        # Functions of a run start are constant, so what lies before a run never shows.
        shift = a[reach:]
        new_low = torch.minimum(torch.maximum(low[:-reach] + shift, low[reach:]), high[reach:])
        new_high = torch.minimum(torch.maximum(high[:-reach] + shift, low[reach:]), high[reach:])
        a = torch.cat([a[:reach], a[:-reach] + shift])
        low = torch.cat([low[:reach], new_low])
        high = torch.cat([high[:reach], new_high])
        reach *= 2
    return low
