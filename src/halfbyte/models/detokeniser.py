"""Token by token to text, and stop strings found in it."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.errors import DataError
from halfbyte.models.tokenizer import Tokenizer

__all__ = ["Detokeniser"]


class Detokeniser:
    """Text of one growing response. A character appears when its last byte has; what has appeared never changes.

    The pieces join to the decoded text of all ids (for SentencePiece's byte fallback only as long as the bytes are
    valid UTF-8: there, one invalid byte changes how its whole run is decoded).

    Arguments:
        tokenizer: of the model.
        stop: strings that end the response. The one that ends first in the text counts, however tokens cut it, and of
            those that end together the longest. The text stops before it; the token ids stay as they were sampled.
        skip_special_tokens: leave special tokens out of the text (and so out of the search for stop strings).
    Attributes:
        text: so far, without the stop string.
        stopped: the stop string that was found, or None.
    Raises:
        DataError: an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        if any(not string for string in stop):
            raise DataError("a stop string is empty", expected="at least one character")
        self._tokenizer, self._stop, self._skip = tokenizer, tuple(stop), skip_special_tokens
        self._ids: list[int] = []
        self._context = 0  # first id whose text the next ids may depend on (a leading space, for example)
        self._shown = 0  # ids before this one are in ``text``
        self.text = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Add a token; returns the new text, which may be empty while a character is incomplete. No-op once stopped."""
        if self.stopped is not None:
            return ""
        self._ids.append(token)
        new = self._pending()
        if not new or new.endswith("\ufffd"):
            return ""
        return self._show(new)

    def finish(self) -> str:
        """No more tokens: returns what was held back, incomplete characters as U+FFFD."""
        return self._show(self._pending()) if self.stopped is None else ""

    def _pending(self) -> str:
        """Text of the ids not shown yet, decoded behind the last shown piece so that joints come out right."""
        before = self._decode(self._ids[self._context : self._shown])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _show(self, new: str) -> str:
        self._context, self._shown = self._shown, len(self._ids)
        previous = len(self.text)
        self.text += new
        found: tuple[int, int, str] | None = None
        for string in self._stop:
            start = self.text.find(string, max(0, previous - len(string) + 1))
            if start >= 0:
                candidate = (start + len(string), start, string)
                found = candidate if found is None else min(found, candidate)
        if found is not None:
            _, start, self.stopped = found
            self.text = self.text[:start]
        return self.text[previous:]
