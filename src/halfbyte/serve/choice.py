"""One choice of an answer, put together from its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import FinishReason
from halfbyte.rollout.stop import first_stop
from halfbyte.serve.job import Piece
from halfbyte.serve.text import TextStream

__all__ = ["Choice", "Delta", "version_runs"]

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass
class Delta:
    """What became certain at once: text, and the tokens behind it.

    ``offsets``: for each token, the characters before it.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None


class Choice:
    """A sample's tokens, log-probs and text.

    Arguments:
        index: in the answer.
        tokenizer, stop: for the text.
        offset: characters in front of it, an echoed prompt's.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str], offset: int = 0) -> None:
        self.index, self._tokenizer, self._stop, self._offset = index, tokenizer, stop, offset
        self._stream = TextStream(tokenizer, stop)
        self._pending = Delta()
        self.count = 0
        self.cached = 0
        self.version: int | None = None

    def add(self, piece: Piece) -> Delta | None:
        """Take a piece; what can be sent now, or None while that is nothing."""
        self._keep(piece)
        pending, text = self._pending, ""
        for token in piece.tokens:
            pending.offsets.append(self._offset + self._stream.length)
            text += self._stream.push([token])
        if piece.finish is not None:
            text += self._stream.finish()
            pending.finish = "stop" if self._stream.stopped else _FINISH[piece.finish]
        if not text and pending.finish is None:
            return None
        pending.text = text
        self._pending = Delta()
        return pending

    def whole(self, pieces: Iterable[Piece], *, offsets: bool) -> Delta:
        """All at once, from all pieces. Without offsets the text is decoded in one go."""
        finish: FinishReason | None = None
        for piece in pieces:
            self._keep(piece)
            finish = piece.finish
        out, self._pending = self._pending, Delta()
        if offsets:
            for token in out.tokens:
                out.offsets.append(self._offset + self._stream.length)
                self._stream.push([token])
        assert finish is not None
        out.finish = _FINISH[finish]
        out.text = self._tokenizer.decode(out.tokens)
        if (found := first_stop(out.text, self._stop)) is not None:
            out.text, out.finish = out.text[: found[0]], "stop"
        return out

    def _keep(self, piece: Piece) -> None:
        pending = self._pending
        pending.tokens += piece.tokens
        pending.logprobs += piece.logprobs
        pending.versions += piece.versions
        pending.alternatives += piece.alternatives
        self.count += len(piece.tokens)
        self.cached = max(self.cached, piece.cached or 0)
        if piece.versions:
            self.version = piece.versions[-1]


def version_runs(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Weight versions token by token, run-length coded: how many tokens each one drew, in order."""
    runs: list[dict[str, Any]] = []
    for version in versions:
        if not runs or runs[-1]["version"] != version:
            runs.append({"version": version, "tokens": 0})
        runs[-1]["tokens"] += 1
    return runs
