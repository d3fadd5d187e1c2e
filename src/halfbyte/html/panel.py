"""A chart with its words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Panel"]


@dataclass(frozen=True)
class Panel:
    """A chart with its words.

    Arguments:
        legend: (colour, text) of each series; empty where the title says it.
        note: how to read it, one or two sentences.
        svg: empty where nothing was recorded.
    """

    title: str
    legend: tuple[tuple[int, str], ...]
    note: str
    svg: str
