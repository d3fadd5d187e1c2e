"""One client's request while the engine works on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.models.trajectory import FinishReason
from halfbyte.rollout.request import Request

__all__ = ["Job", "Piece"]


@dataclass(frozen=True)
class Piece:
    """What a sample drew since its last piece.

    Arguments:
        choice: index of the sample among those of its job.
        tokens, logprobs, versions: alike in length.
        alternatives: (id, log-prob) of the most likely tokens for each one; empty unless asked for.
        finish: why the sample ended, with its last piece.
        cached: prompt tokens found in the prefix cache, with the last piece of the sample that ran the prompt.
        seen_at: when the first of the tokens was drawn (``time.perf_counter``).
    """

    choice: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()
    finish: FinishReason | None = None
    cached: int | None = None
    seen_at: float = 0.0


class Job:
    """Requests to the engine that one answer is made of, and the pieces that have come for it.

    The engine's thread reads ``requests``, ``stream`` and ``group``; everything else belongs to the event loop.

    Arguments:
        group: number of the job, its requests' group.
        requests: one a prompt; their samples are the choices, in order.
        stream: whether tokens are wanted as they come, or each sample at its end.
    """

    def __init__(self, group: int, requests: Sequence[Request], *, stream: bool) -> None:
        self.group, self.requests, self.stream = group, tuple(requests), stream
        self.choices = sum(request.n for request in requests)
        self.running = self.choices
        self.cancelled = False
        self._pieces: list[Piece] = []
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def put(self, news: Piece | Exception) -> None:
        """Take what the engine sends."""
        if isinstance(news, Exception):
            self._failure = self._failure or news
            self.running = 0
        else:
            self._pieces.append(news)
            self.running -= news.finish is not None
        self._news.set()

    def cancel(self) -> None:
        """Nobody waits for this any more; :meth:`pieces` returns."""
        self.cancelled = True
        self._news.set()

    async def pieces(self) -> list[Piece]:
        """All pieces since the last call, waiting for one; empty once all samples have ended or the job was cancelled.

        Raises:
            Exception: what the engine failed with.
        """
        while not self._pieces and self._failure is None and self.running and not self.cancelled:
            self._news.clear()
            await self._news.wait()
        if self.cancelled:
            return []
        if self._failure is not None:
            raise self._failure
        pieces, self._pieces = self._pieces, []
        return pieces
