"""Runs of tokens that no segment crosses the border of: sample, masked span, turn of the policy, weight version.

Everything is vectorised. The result does not depend on row order, padding or packing if positions are given, and otherwise
on the order of the tokens within their sample only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import ShapeError
from halfbyte.objective.validation import require_finite, require_index, require_mask, require_real

__all__ = ["Runs", "SegmentInput", "Segmenter", "block_begins", "find_runs", "label"]


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentInput:
    """What a segmenter may look at: the global batch, flat.

    Arguments:
        mask: [T] bool, response tokens that count.
        sequence_index: [T] int64, the sample of a token; -1 for padding of no sample. A masked token that has a sample
            (an observation between two turns) separates the tokens around it.
        positions: [T] int64 or None: place of a token in its response. None: tokens of a sample stand in order.
        versions: [T] int64 or None, weight version that sampled the token.
        turn_starts: [T] bool or None, first token of a turn of the policy.
        delimiters: [T] bool or None, tokens that end a line or sentence (see ``delimiter_ids``); for ``delimiter``.
        gap, advantages: [T] float32 or None, for ``change_point``.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        NumericsError: NaN or infinity on a token that counts.
    """

    mask: Tensor
    sequence_index: Tensor
    positions: Tensor | None = None
    versions: Tensor | None = None
    turn_starts: Tensor | None = None
    delimiters: Tensor | None = None
    gap: Tensor | None = None
    advantages: Tensor | None = None

    def __post_init__(self) -> None:
        require_mask("mask", self.mask)
        length = self.mask.shape[0]
        require_index("sequence_index", self.sequence_index, length, self.mask)
        for name, index in (("positions", self.positions), ("versions", self.versions)):
            if index is not None:
                require_index(name, index, length, self.mask)
        for name, flags in (("turn_starts", self.turn_starts), ("delimiters", self.delimiters)):
            if flags is not None:
                require_mask(name, flags, length)
        for name, values in (("gap", self.gap), ("advantages", self.advantages)):
            if values is not None:
                require_real(name, values, length)
                require_finite(name, values, self.mask, self.sequence_index)


@dataclass(frozen=True, eq=False)
class Runs:
    """The tokens that count, in order, cut where no segment may cross.

    Arguments:
        order: [N] int64, their flat places, by sample and position.
        start, end: [N] int64, for each of them where in ``order`` its run begins and ends (end excluded).
    """

    order: Tensor
    start: Tensor
    end: Tensor


class Segmenter(Protocol):
    """A named rule from the layout of a batch to segments."""

    @property
    def name(self) -> str:
        """Name in the registry."""

    def __call__(self, tokens: SegmentInput) -> Tensor:
        """Segment of each token: [T] int64, 0..n-1 in order of sample and position, -1 where mask is false."""


def find_runs(tokens: SegmentInput) -> Runs:
    """Order the tokens and cut at samples, masked spans, turns and versions."""
    placed = tokens.mask | (tokens.sequence_index >= 0)
    flat = torch.nonzero(placed)[:, 0]
    sequence = tokens.sequence_index[flat]
    if tokens.positions is not None:
        by_position = torch.argsort(tokens.positions[flat], stable=True)
        flat, sequence = flat[by_position], sequence[by_position]
    if bool((sequence[1:] < sequence[:-1]).any()):
        by_sequence = torch.argsort(sequence, stable=True)
        flat, sequence = flat[by_sequence], sequence[by_sequence]
    real = torch.nonzero(tokens.mask[flat])[:, 0]
    order, sequence = flat[real], sequence[real]
    begins = torch.ones(order.shape[0], dtype=torch.bool, device=order.device)
    if order.numel() == 0:
        return Runs(order, order, order)
    new = sequence[1:] != sequence[:-1]
    if tokens.positions is not None:
        place = tokens.positions[order]
        twice = ~new & (place[1:] == place[:-1])
        if bool(twice.any()):
            where = int(order[1:][twice][0])
            raise ShapeError("two tokens of a sample share a position", where=f"flat token {where}", expected="unique")
        new = new | (place[1:] != place[:-1] + 1)
    else:
        new = new | (real[1:] != real[:-1] + 1)
    if tokens.versions is not None:
        version = tokens.versions[order]
        new = new | (version[1:] != version[:-1])
    if tokens.turn_starts is not None:
        new = new | tokens.turn_starts[order][1:]
    begins[1:] = new
    return Runs(order, *_borders(begins))


def label(tokens: SegmentInput, runs: Runs, begins: Tensor) -> Tensor:
    """Segment ids from the places where segments begin.

    Arguments:
        begins: [N] bool in the order of ``runs``; the first token of every run must be among them.
    """
    out = torch.full_like(tokens.sequence_index, -1)
    out[runs.order] = begins.to(torch.int64).cumsum(0) - 1
    return out


def _borders(begins: Tensor) -> tuple[Tensor, Tensor]:
    """Start and end (excluded) of the piece of each place, from the places where pieces begin."""
    starts = torch.nonzero(begins)[:, 0]
    piece = begins.to(torch.int64).cumsum(0) - 1
    ends = torch.cat([starts[1:], starts.new_tensor([begins.shape[0]])])
    return starts[piece], ends[piece]


def block_begins(places: Tensor, start: Tensor, end: Tensor, size: int) -> Tensor:
    """[N] bool: places where a block of ``size`` begins within the piece [start, end) of each place."""
    offset = places - start
    long_enough = 2 * (end - places) >= size
    return (offset == 0) | ((offset % size == 0) & long_enough)
