"""The load client: one request, one :class:`Reply`, whatever the server does.

A failure is a result, so nothing here raises for what a server sends or fails to send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from halfbyte.errors import MissingExtraError
from halfbyte.trial.stream import Assembly, BadResponseError, EventReader

__all__ = ["Client", "Endpoint", "Reply", "aiohttp_module", "open_client"]

_SHOWN = 160


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Arguments:
        base: address with the ``/v1``.
        model: name to ask for.
        headers: of every request; a token is in here, never in a record.
    """

    base: str
    model: str
    headers: Mapping[str, str]

    @property
    def root(self) -> str:
        """The address without the ``/v1``: /health, /metrics and /version lie there."""
        return self.base.removesuffix("/v1")


@dataclass(frozen=True)
class Reply:
    """What came of a request; the fields are those of ``Record``."""

    started: float
    ttft: float | None
    latency: float
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    calls: str = ""
    error: str | None = None
    attempts: int = 1


def aiohttp_module() -> ModuleType:
    """The package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import aiohttp
    except ImportError as error:
        what = f"a trial sends its requests with aiohttp, which cannot be imported: {error}"
        raise MissingExtraError(what, expected="aiohttp installed", fix="pip install 'halfbyte[trial]'") from error
    return aiohttp


class Client:
    """An open session. Every request has a connection of its own, so none meets one that the server has just closed."""

    def __init__(self, session: Any, timeout: float, retries: int) -> None:
        self._session, self._timeout, self._retries = session, timeout, retries

    async def get(self, url: str, headers: Mapping[str, str] | None = None, timeout: float = 10.0) -> tuple[int, str]:
        """Status and text of a GET; status 0 where nothing answered, with the reason as text."""
        return await self._simple("GET", url, headers, timeout)

    async def post(self, url: str, headers: Mapping[str, str] | None = None, timeout: float = 30.0) -> tuple[int, str]:
        """Status and text of a POST without a body, as :meth:`get`."""
        return await self._simple("POST", url, headers, timeout)

    async def _simple(
        self, method: str, url: str, headers: Mapping[str, str] | None, timeout: float
    ) -> tuple[int, str]:
        aiohttp = aiohttp_module()
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._session.request(method, url, headers=headers, timeout=limit) as response:
                return response.status, await response.text(errors="backslashreplace")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return 0, _reason(error)

    async def ask(self, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> Reply:
        """Send one request, and again after a failure as often as retries allow; times are of the last try."""
        for attempt in range(1, self._retries + 2):
            reply = replace(await self._once(endpoint, path, body), attempts=attempt)
            if reply.error is None:
                break
        return reply

    async def ask_all(
        self,
        endpoint: Endpoint,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        concurrency: int,
        took: Callable[[int, Reply], None],
    ) -> None:
        """Send requests in order, ``concurrency`` at a time; ``took`` gets each reply as it comes, with its index."""
        waiting = iter(enumerate(bodies))

        async def work() -> None:
            for index, body in waiting:
                took(index, await self.ask(endpoint, path, body))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(bodies))):
                group.create_task(work())

    async def _once(self, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> Reply:
        aiohttp = aiohttp_module()
        assembly, started, clock = Assembly(), time.time(), time.perf_counter()
        ttft: float | None = None
        error: str | None = None
        answered = False
        try:
            async with asyncio.timeout(self._timeout):
                url = endpoint.base + path
                async with self._session.post(url, json=body, headers=endpoint.headers) as response:
                    if response.status != 200:
                        text = await response.text(errors="backslashreplace")
                        raise BadResponseError(f"http {response.status}: {text[:_SHOWN]}")
                    answered = True
                    if body.get("stream"):
                        events = EventReader()
                        async for piece in response.content.iter_any():
                            for data in events.feed(piece):
                                if assembly.event(data) and ttft is None:
                                    ttft = time.perf_counter() - clock
                            if assembly.done:
                                break
                    else:
                        assembly.whole(await response.text(errors="backslashreplace"))
                        assembly.done = True
            if not assembly.done or assembly.finish_reason is None:
                error = "truncated stream" if body.get("stream") else "bad json: no finish_reason"
        except BadResponseError as problem:
            error = str(problem)
        except TimeoutError:
            error = f"timeout: no end within {self._timeout:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            error = f"{'truncated stream' if answered else 'connection'}: {_reason(problem)}"
        latency = time.perf_counter() - clock
        if error is not None:
            error = error.encode("utf-8", "backslashreplace").decode("utf-8")
            return Reply(started, ttft, latency, prompt_tokens=assembly.tokens("prompt_tokens"), error=error)
        return Reply(
            started,
            ttft,
            latency,
            prompt_tokens=assembly.tokens("prompt_tokens"),
            completion_tokens=assembly.tokens("completion_tokens"),
            cached_tokens=assembly.tokens("prompt_tokens_details", "cached_tokens"),
            finish_reason=assembly.finish_reason,
            text=assembly.text,
            calls=assembly.calls,
        )


@asynccontextmanager
async def open_client(timeout: float, retries: int = 0) -> AsyncIterator[Client]:
    """A client; its session closes with the block."""
    aiohttp = aiohttp_module()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield Client(session, timeout, retries)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()[:_SHOWN]
