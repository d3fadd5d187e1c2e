"""The text of a sample while it grows: whole characters only, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfbyte.models.detokeniser import Detokeniser
from halfbyte.models.tokenizer import Tokenizer

__all__ = ["TextStream", "held_back"]


class TextStream:
    """Pieces of text that never have to be taken back; together they are the text of the whole sample.

    Arguments:
        tokenizer: of the model.
        stop: strings that end the text and are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokeniser = Detokeniser(tokenizer, stop)
        self._stop = tuple(stop)
        self._sent = 0

    @property
    def length(self) -> int:
        """Characters so far, those held back included."""
        return len(self._detokeniser.text)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; no text comes after it."""
        return self._detokeniser.stopped is not None

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens; the text that is certain now."""
        for token in tokens:
            self._detokeniser.push(token)
        text = self._detokeniser.text
        keep = 0 if self.stopped else held_back(text, self._stop)
        return self._take(len(text) - keep)

    def finish(self) -> str:
        """No more tokens: the rest."""
        self._detokeniser.finish()
        return self._take(len(self._detokeniser.text))

    def _take(self, end: int) -> str:
        out = self._detokeniser.text[self._sent : end]
        self._sent = max(self._sent, end)
        return out


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a stop string."""
    most = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), most, -1):
            if text.endswith(string[:length]):
                most = length
                break
    return most
