"""Stop strings, found in the text of the sampled ids; the ids themselves are never re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokeniser", "find_stop", "first_stop"]

#: What a decoder shows for bytes that are no character yet.
_INCOMPLETE = "\ufffd"


class Detokeniser(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """(where it begins, stop string) of the stop string that ends first in ``text``, of several the longest; or None.

    The rule of :class:`halfbyte.models.detokeniser.Detokeniser`.
    """
    found = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    if not found:
        return None
    _, start, string = min(found)
    return start, string


def find_stop(detokeniser: Detokeniser, tokens: Sequence[int], length: int, stop: Sequence[str]) -> str | None:
    """The stop string completed by the last token of a response (the last ``length`` of ``tokens``), or None.

    Asked after every token, so earlier text holds none. The end of the response is decoded as far back as it takes: a
    token may be several characters, a part of one, or nothing at all (special tokens), so the piece grows until the
    text before the last token is longer than the longest stop string. Where the piece begins inside a character, or a
    decoder drops a leading space, that text is not counted. A character whose bytes are not all there is no text yet.
    """
    longest = max(map(len, stop))
    window = longest + 4
    while True:
        window = min(window, length)
        piece = tokens[len(tokens) - window :]
        if window == length or len(detokeniser.decode(piece[:-1]).strip(_INCOMPLETE)) > longest:
            break
        window *= 2
    found = first_stop(detokeniser.decode(piece).rstrip(_INCOMPLETE), stop)
    return None if found is None else found[1]
