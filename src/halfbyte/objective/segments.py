"""Segments: pieces of responses, the unit in which a mismatch is diagnosed.

No segment crosses the border of a run (``halfbyte.objective.runs``); within one a segmenter decides.

Source: arXiv 2610.07043 diagnoses "response segments" without settling what they are; every rule here is a reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from halfbyte.errors import ConfigError
from halfbyte.objective.change_point import ChangePoint
from halfbyte.objective.options import build
from halfbyte.objective.runs import Runs, Segmenter, SegmentInput, block_begins, find_runs, label

__all__ = [
    "SEGMENTERS",
    "ChangePoint",
    "Delimiter",
    "Fixed",
    "SegmentInput",
    "Segmenter",
    "Turn",
    "delimiter_flags",
    "make_segmenter",
]


@dataclass(frozen=True)
class Turn:
    """A segment is a turn of the policy (the whole response in single-turn tasks)."""

    @property
    def name(self) -> str:
        """Registry name."""
        return "turn"

    def __call__(self, tokens: SegmentInput) -> Tensor:
        """See :class:`Segmenter`."""
        runs = find_runs(tokens)
        places = torch.arange(runs.order.shape[0], device=runs.order.device)
        return label(tokens, runs, places == runs.start)


@dataclass(frozen=True)
class Fixed:
    """Blocks of ``size`` tokens from the start of each run; a last block shorter than half joins the one before.

    Arguments:
        size: tokens, at least 1.

    Raises:
        ConfigError: size is below 1.
    """

    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size is {self.size}", where="fixed", expected="an integer >= 1")

    @property
    def name(self) -> str:
        """Registry name."""
        return "fixed"

    def __call__(self, tokens: SegmentInput) -> Tensor:
        """See :class:`Segmenter`."""
        runs = find_runs(tokens)
        places = torch.arange(runs.order.shape[0], device=runs.order.device)
        return label(tokens, runs, block_begins(places, runs.start, runs.end, self.size))


@dataclass(frozen=True)
class Delimiter:
    """Cut after the first delimiter at which a segment has ``shortest`` tokens, or at ``longest`` tokens.

    A rest shorter than ``shortest`` joins the segment before it, or, where that would get too long, takes tokens of it.

    Arguments:
        shortest, longest: tokens; 1 <= shortest and 2 * shortest <= longest.

    Raises:
        ConfigError: the lengths do not fit; when called: the batch has no ``delimiters``.
    """

    shortest: int = 8
    longest: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest // 2:
            raise ConfigError(
                f"shortest {self.shortest} and longest {self.longest}",
                where="delimiter",
                expected="1 <= shortest and 2 * shortest <= longest",
            )

    @property
    def name(self) -> str:
        """Registry name."""
        return "delimiter"

    def __call__(self, tokens: SegmentInput) -> Tensor:
        """See :class:`Segmenter`."""
        if tokens.delimiters is None:
            raise ConfigError(
                "segmenter 'delimiter' needs to know which tokens end a line or sentence",
                where="delimiters",
                fix="pass delimiters (delimiter_flags of the vocabulary, by token id), or use 'fixed'",
            )
        runs = find_runs(tokens)
        return label(tokens, runs, _reachable(runs, self._next(runs, tokens.delimiters[runs.order])))

    def _next(self, runs: Runs, delimiters: Tensor) -> Tensor:
        """[N] int64: if a segment began here, where the next one would begin."""
        places = torch.arange(runs.order.shape[0], device=runs.order.device)
        after = torch.nonzero(delimiters)[:, 0] + 1
        after = torch.cat([after, after.new_tensor([2**62])])
        cut = after[torch.searchsorted(after, places + self.shortest)]
        cut = torch.minimum(torch.minimum(cut, places + self.longest), runs.end)
        short_rest = (cut < runs.end) & (runs.end - cut < self.shortest)
        whole = torch.where(runs.end - places <= self.longest, runs.end, runs.end - self.shortest)
        return torch.where(short_rest, whole, cut)


def _reachable(runs: Runs, following: Tensor) -> Tensor:
    """[N] bool: places reached from the start of their run by going to ``following`` again and again (pointer doubling)."""
    count = following.shape[0]
    reached = torch.zeros(count + 1, dtype=torch.bool, device=following.device)
    reached[runs.start] = True
    jump = torch.cat([following, following.new_tensor([count])])
    seen = 0
    while (now := int(reached.sum())) > seen:
        seen = now
        reached[jump[reached]] = True
        jump = jump[jump]
    return reached[:count]


def delimiter_flags(texts: Sequence[str]) -> Tensor:
    """Which tokens of a vocabulary end a line or a sentence.

    Arguments:
        texts: the text of each token id.

    Returns:
        [V] bool: the text holds a line break, or ends (spaces aside) in . ! ? ; : or their CJK forms.
    """
    ends = tuple(".!?;:\u3002\uff01\uff1f\uff1b\uff1a")
    return torch.tensor(["\n" in text or text.rstrip().endswith(ends) for text in texts], dtype=torch.bool)


SEGMENTERS: Mapping[str, Callable[..., Segmenter]] = MappingProxyType(
    {"turn": Turn, "delimiter": Delimiter, "fixed": Fixed, "change_point": ChangePoint}
)
"""Name -> class. Read only."""


def make_segmenter(name: str, /, **parameters: object) -> Segmenter:
    """Build a segmenter from configuration.

    Raises:
        ConfigError: unknown name or option, or a value that the rule refuses.
    """
    return build("segmenter", SEGMENTERS, name, parameters)
