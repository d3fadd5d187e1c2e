"""The event loop's side of the engine: who may come in, and what comes back to whom."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from halfbyte.errors import ConfigError, UserError
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.request import Request
from halfbyte.serve.job import Job
from halfbyte.serve.logprobs import TokenTexts
from halfbyte.serve.loop import Delivery, EngineLoop, Stopped
from halfbyte.serve.metrics import Metrics
from halfbyte.serve.opening import Opened
from halfbyte.serve.parameters import SamplingBody
from halfbyte.serve.problem import Problem
from halfbyte.serve.prompts import prompt_key
from halfbyte.serve.settings import ServeSettings

__all__ = ["Service"]

#: Seconds that a refused client is told to wait.
RETRY_AFTER = {"Retry-After": "1"}


class Service:
    """Admission, submission, delivery.

    Arguments:
        opened: what is served.
        settings: limits.

    Attributes:
        active: requests being worked on.
        draining: whether new requests are refused.
    """

    def __init__(self, opened: Opened, settings: ServeSettings) -> None:
        self.opened, self.settings = opened, settings
        self.tokenizer, self.texts = opened.tokenizer, TokenTexts(opened.tokenizer)
        engine = opened.engine
        pool = engine.pool
        self.max_length = min(engine.max_length, pool.n_pages * pool.page_size)
        self.loop = EngineLoop(
            engine, self._delivered, on_refit=settings.on_refit, stream_seconds=settings.stream_seconds
        )
        labels = {"model": settings.name, **opened.facts}
        self.metrics = Metrics(pool, lambda: self.loop.snapshot, labels)
        self.metrics.active.set_function(lambda: self.active)
        self.metrics.queue.set_function(lambda: max(0, self._samples - self.loop.snapshot.running))
        self.active = 0
        self.draining = False
        self._samples = 0
        self._jobs: dict[int, Job] = {}
        self._next = 0
        self._events: asyncio.AbstractEventLoop | None = None

    @property
    def version(self) -> int:
        """The weight version that draws tokens."""
        return self.loop.snapshot.version

    def start(self) -> None:
        """Begin; call it on the event loop that will serve."""
        self._events = asyncio.get_running_loop()
        self.loop.start()

    def check_open(self) -> None:
        """Refuse a request that may not come in now.

        Raises:
            Problem: 503 while the server goes down.
        """
        if self.draining:
            headers = {**RETRY_AFTER, "Connection": "close"}
            raise Problem(503, "The server is going down.", code="draining", headers=headers)

    def requests(
        self, prompts: Sequence[tuple[int, ...]], body: SamplingBody, max_tokens: int | None, alternatives: int
    ) -> list[Request]:
        """What the engine is asked, one request a prompt. A prompt given twice is the same prompt with more samples.

        Arguments:
            max_tokens: None takes the room there is.
        Raises:
            Problem: 400, a prompt or a parameter that cannot be used.
        """
        choices = len(prompts) * body.n
        if choices > self.settings.max_n:
            raise Problem(400, f"{choices} choices are wanted, at most {self.settings.max_n} are given.", param="n")
        seed = secrets.randbits(63) if body.seed is None else body.seed
        out: list[Request] = []
        seen: dict[tuple[int, ...], int] = {}
        for ids in prompts:
            sampling = self._sampling(body, seed, self._room(ids, max_tokens))
            first = seen.get(ids, 0)
            seen[ids] = first + body.n
            request = Request(
                ids,
                sampling,
                n=body.n,
                key=prompt_key(ids),
                group=self._next,
                first_sample=first,
                alternatives=alternatives,
            )
            try:
                self.opened.engine.check(request)
            except UserError as error:
                raise Problem(400, error.what, param="prompt") from None
            out.append(request)
        return out

    def submit(self, requests: Sequence[Request], *, stream: bool) -> Job:
        """Hand requests to the engine.

        Raises:
            Problem: 429, too many samples wait already.
        """
        job = Job(requests[0].group, requests, stream=stream)
        if self._samples and self._samples + job.choices > self.settings.max_sequences + self.settings.max_queue:
            raise Problem(429, "Too many requests are waiting.", code="queue_full", headers=RETRY_AFTER)
        self._next += 1
        self._samples += job.choices
        self._jobs[job.group] = job
        self.loop.submit(job)
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more; its samples stop and their pages are freed."""
        if job.group in self._jobs:
            job.cancel()
            self.loop.cancel(job)

    def cancel_all(self) -> None:
        """Give up everything in flight; those who wait are told."""
        for job in [*self._jobs.values()]:
            self._dispatch([(job, Stopped("the server is going down"))])
            self.loop.cancel(job)

    def _delivered(self, news: Delivery) -> None:
        """In the engine's thread."""
        assert self._events is not None
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._dispatch, news)

    def _dispatch(self, news: Delivery) -> None:
        for job, piece in news:
            if self._jobs.get(job.group) is not job:
                continue  # told already that it is over
            before = job.running
            job.put(piece)
            self._samples -= before - job.running
            if not job.running:
                self._jobs.pop(job.group, None)

    def _room(self, ids: tuple[int, ...], wanted: int | None) -> int:
        """New tokens that a prompt may get."""
        room = self.max_length - len(ids)
        longest = min(self.max_length - 1, self.settings.max_prompt or self.max_length)
        if not ids:
            raise Problem(400, "The prompt encodes to no token.", param="prompt")
        if len(ids) > longest:
            raise Problem(
                400,
                f"The prompt has {len(ids)} tokens; at most {longest} are taken.",
                param="prompt",
                code="context_length_exceeded",
            )
        if wanted is not None and wanted > room:
            raise Problem(
                400,
                f"The prompt's {len(ids)} tokens and {wanted} new ones are more than {self.max_length}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return room if wanted is None else wanted

    def _sampling(self, body: SamplingBody, seed: int, max_tokens: int) -> SamplingParams:
        try:
            return SamplingParams(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=max(body.top_k or 0, 0),
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=body.min_p or 0.0,
                max_tokens=max_tokens,
                stop_ids=tuple(body.stop_token_ids or ()),
                stop=tuple(body.stop or ()),
                seed=seed,
                ignore_eos=body.ignore_eos,
            )
        except ConfigError as error:
            param = error.where.removeprefix("sampling.")
            raise Problem(400, f"{error.what}; expected {error.expected}.", param=param) from None
