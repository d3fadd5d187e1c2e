"""``/v1/chat/completions`` and ``/v1/completions``: one request from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from halfbyte.errors import NumericsError, UserError
from halfbyte.serve.answers import Answer, Endpoint, encode, usage
from halfbyte.serve.choice import Choice
from halfbyte.serve.guard import ClientGone, Receive, Scope, Send, read_body, send_json, send_problem
from halfbyte.serve.job import Job, Piece
from halfbyte.serve.loop import Stopped
from halfbyte.serve.parameters import ChatBody, CompletionBody, SamplingBody, parse, read_object
from halfbyte.serve.problem import Problem
from halfbyte.serve.prompts import chat_ids, completion_ids
from halfbyte.serve.service import Service

__all__ = ["Completions"]

_log = logging.getLogger("halfbyte.serve")
#: Bytes of a body that are turned to ids at once; longer ones go to a thread.
_QUICK = 1 << 15
_OUTCOMES = {429: "overloaded", 503: "unavailable", 504: "timeout", 500: "error"}
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Completions:
    """An ASGI endpoint.

    Arguments:
        service: does the work.
        endpoint: whose shapes.
    """

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self.service, self.endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        service, call = self.service, _Call(self.service, self.endpoint, scope, receive, send)
        began, outcome = time.perf_counter(), "error"
        service.active += 1
        try:
            try:
                async with asyncio.timeout(service.settings.request_seconds):
                    await call.run(began)
                outcome = "ok"
            except Exception as error:
                problem = _problem(error)
                outcome = "cancelled" if problem is None else _OUTCOMES.get(problem.status, "refused")
                if problem is not None:
                    await call.refuse(problem)
        finally:
            service.active -= 1
            await call.close()
            service.metrics.requests.labels(self.endpoint, outcome).inc()
            if outcome == "ok":
                service.metrics.latency.observe(time.perf_counter() - began)


class _Call:
    """One request on its way."""

    def __init__(self, service: Service, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self.service, self.endpoint, self.scope, self.receive, self.send = service, endpoint, scope, receive, send
        self.started = False
        self._job: Job | None = None
        self._watch: asyncio.Task[None] | None = None

    async def run(self, began: float) -> None:
        """From body to answer.

        Raises:
            Problem, ClientGone, UserError, TimeoutError.
        """
        service = self.service
        service.check_open()
        raw = await read_body(self.scope, self.receive, service.settings.max_body_bytes)
        if len(raw) > _QUICK:
            body, prompts = await asyncio.to_thread(self._prepare, raw)
        else:
            body, prompts = self._prepare(raw)
        wanted, alternatives = _tokens_wanted(body), _alternatives(body)
        service.check_open()
        requests = service.requests(prompts, body, wanted, alternatives)
        job = self._job = service.submit(requests, stream=bool(body.stream))
        self._watch = asyncio.create_task(self._watch_client(job))
        answer = Answer(
            self.endpoint,
            service.settings.name,
            service.opened.engine.precision.name,
            service.texts,
            logprobs=_wants_logprobs(body),
            token_ids=body.return_token_ids,
        )
        echo = isinstance(body, CompletionBody) and body.echo
        prefixes = [service.tokenizer.decode(request.prompt_ids) if echo else "" for request in requests]
        choices = [
            Choice(index, service.tokenizer, body.stop or (), len(prefixes[index // body.n]))
            for index in range(job.choices)
        ]
        part = _Parts(answer, requests_ids=[list(ids) for ids in prompts], n=body.n, prefixes=prefixes)
        if body.stream:
            counted = await self._stream(job, part, choices, body, began)
        else:
            counted = await self._whole(job, part, choices, began)
        metrics = service.metrics
        metrics.prompt_tokens.inc(counted["prompt_tokens"])
        metrics.generated_tokens.inc(counted["completion_tokens"])
        metrics.cached_tokens.inc(counted["prompt_tokens_details"]["cached_tokens"])

    async def refuse(self, problem: Problem) -> None:
        """Say what went wrong: as the answer, or as the last event of a stream that has begun."""
        with suppress(OSError):
            if self.started:
                event = b"data: " + problem.encoded() + b"\n\n"
                await self.send({"type": "http.response.body", "body": event})
            else:
                await send_problem(self.send, problem)

    async def close(self) -> None:
        """Leave nothing behind."""
        if self._watch is not None:
            self._watch.cancel()
        if self._job is not None:
            self.service.cancel(self._job)

    def _prepare(self, raw: bytes) -> tuple[SamplingBody, list[tuple[int, ...]]]:
        value = read_object(raw)
        service = self.service
        body: ChatBody | CompletionBody
        if self.endpoint == "chat":
            body = parse(ChatBody, value)
        else:
            body = parse(CompletionBody, value)
        if body.model != service.settings.name:
            message = f"The model '{body.model[:200]}' does not exist; this server has '{service.settings.name}'."
            raise Problem(404, message, param="model", code="model_not_found")
        if body.stream_options is not None and not body.stream:
            raise Problem(400, "'stream_options' needs 'stream': true.", param="stream_options")
        if isinstance(body, ChatBody):
            if body.top_logprobs and not body.logprobs:
                raise Problem(400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
            return body, chat_ids(service.tokenizer, body)
        if body.best_of is not None and body.best_of != body.n:
            raise Problem(400, "'best_of' other than 'n' is not supported by this server.", param="best_of")
        if body.echo and body.logprobs is not None:
            raise Problem(400, "'echo' with 'logprobs' is not supported by this server.", param="echo")
        return body, completion_ids(service.tokenizer, body)

    async def _watch_client(self, job: Job) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.service.cancel(job)

    async def _whole(self, job: Job, parts: _Parts, choices: list[Choice], began: float) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in choices]
        first = True
        while news := await job.pieces():
            if first:
                self.service.metrics.first_token.observe(news[0].seen_at - began)
                first = False
            for piece in news:
                pieces[piece.choice].append(piece)
        if job.cancelled:
            raise ClientGone
        offsets = parts.answer.logprobs and self.endpoint == "completions"
        shown = [parts.whole(choice, choice.whole(mine, offsets=offsets)) for choice, mine in zip(choices, pieces)]
        counted = parts.usage(choices)
        version = max(choice.version or 0 for choice in choices)
        self.started = True
        await send_json(self.send, encode(parts.answer.whole(shown, counted, version)))
        return counted

    async def _stream(
        self, job: Job, parts: _Parts, choices: list[Choice], body: SamplingBody, began: float
    ) -> dict[str, Any]:
        options = body.stream_options
        with_usage = options is not None and options.include_usage
        extra = {"usage": None} if with_usage else None
        opened: set[int] = set()
        while news := await job.pieces():
            if not self.started:
                self.service.metrics.first_token.observe(news[0].seen_at - began)
                self.started = True
                await self.send({"type": "http.response.start", "status": 200, "headers": _SSE})
            events = b""
            for piece in _merged(news):
                choice = choices[piece.choice]
                delta = choice.add(piece)
                if delta is None:
                    continue
                version = choice.version or 0
                beginning = choice.index not in opened
                opened.add(choice.index)
                if beginning and self.endpoint == "chat":
                    events += _event(parts.answer.chunk([parts.answer.opening(choice.index)], version, extra))
                events += _event(parts.answer.chunk([parts.part(choice, delta, beginning)], version, extra))
            if events:
                await self.send({"type": "http.response.body", "body": events, "more_body": True})
        if job.cancelled:
            raise ClientGone
        counted = parts.usage(choices)
        last = b""
        if with_usage:
            version = max(choice.version or 0 for choice in choices)
            last = _event(parts.answer.chunk([], version, {"usage": counted}))
        await self.send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n"})
        return counted


class _Parts:
    """The parts of an answer over several prompts of ``n`` choices each."""

    def __init__(self, answer: Answer, *, requests_ids: list[list[int]], n: int, prefixes: list[str]) -> None:
        self.answer, self._ids, self._n, self._prefixes = answer, requests_ids, n, prefixes

    def whole(self, choice: Choice, delta: Any) -> dict[str, Any]:
        at = choice.index // self._n
        return self.answer.choice(choice.index, delta, prefix=self._prefixes[at], prompt=self._ids[at])

    def part(self, choice: Choice, delta: Any, beginning: bool) -> dict[str, Any]:
        at = choice.index // self._n
        prefix, prompt = (self._prefixes[at], self._ids[at]) if beginning else ("", None)
        return self.answer.part(choice.index, delta, prefix=prefix, prompt=prompt)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        cached = sum(choice.cached for choice in choices if choice.index % self._n == 0)
        return usage(sum(map(len, self._ids)), sum(choice.count for choice in choices), cached)


def _merged(news: Sequence[Piece]) -> list[Piece]:
    """Pieces of the same choice as one: a client that is behind gets fewer, longer events."""
    by_choice: dict[int, list[Piece]] = {}
    for piece in news:
        by_choice.setdefault(piece.choice, []).append(piece)
    return [pieces[0] if len(pieces) == 1 else _joined(pieces) for pieces in by_choice.values()]


def _joined(pieces: Sequence[Piece]) -> Piece:
    last = pieces[-1]
    return Piece(
        last.choice,
        [token for piece in pieces for token in piece.tokens],
        [value for piece in pieces for value in piece.logprobs],
        [version for piece in pieces for version in piece.versions],
        [row for piece in pieces for row in piece.alternatives],
        last.finish,
        last.cached,
        pieces[0].seen_at,
    )


def _event(value: object) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _tokens_wanted(body: SamplingBody) -> int | None:
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
            raise Problem(400, "'max_tokens' and 'max_completion_tokens' differ.", param="max_tokens")
        return body.max_completion_tokens or body.max_tokens
    return body.max_tokens or 16


def _alternatives(body: SamplingBody) -> int:
    if isinstance(body, ChatBody):
        return body.top_logprobs or 0
    return (body.logprobs or 0) if isinstance(body, CompletionBody) else 0


def _wants_logprobs(body: SamplingBody) -> bool:
    if isinstance(body, ChatBody):
        return bool(body.logprobs)
    return isinstance(body, CompletionBody) and body.logprobs is not None


def _problem(error: Exception) -> Problem | None:
    """What to tell the client; None where it has gone."""
    if isinstance(error, ClientGone | ConnectionError):
        return None
    if isinstance(error, Problem):
        return error
    if isinstance(error, TimeoutError):
        return Problem(504, "The request took too long.", code="timeout")
    if isinstance(error, Stopped):
        return Problem(503, error.what, code="draining")
    if isinstance(error, NumericsError):
        _log.error("%s", error)
        return Problem(500, error.what, code="numerics_error")
    if isinstance(error, UserError):
        return Problem(400, error.what)
    _log.error("a request failed", exc_info=error)
    return Problem(500, "The server failed on this request.", code="internal_error")
