"""A reward that gives every group a signal, whatever is sampled."""

from __future__ import annotations


def ones(*, response: str, **_: object) -> float:
    """Share of ones."""
    return response.count("1") / 8
