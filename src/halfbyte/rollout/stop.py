"""Stop strings, found in the text of the sampled ids; the ids themselves are never re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokeniser", "find_stop"]


class Detokeniser(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...


def find_stop(detokeniser: Detokeniser, tokens: Sequence[int], length: int, stop: Sequence[str]) -> str | None:
    """The first stop string completed by the last token of a response (the last ``length`` of ``tokens``), or None.

    Only the tokens that can hold the longest stop string are decoded: a token adds at least one byte, so ``4 * len`` tokens
    always cover it (a character is at most four bytes).
    """
    window = min(length, 4 * max(map(len, stop)) + 4)
    text = detokeniser.decode(tokens[len(tokens) - window :])
    for candidate in stop:
        if candidate in text:
            return candidate
    return None
