"""Who may ask, and how much they may send."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from halfbyte.serve.problem import Problem

__all__ = ["App", "BearerGuard", "ClientGone", "Receive", "Scope", "Send", "read_body", "send_json", "send_problem"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """The client has closed its connection."""


class BearerGuard:
    """Lets requests with the right bearer token through, and those to open paths.

    Arguments:
        app: behind the guard.
        token: the right one; None opens everything.
        open_paths: that need none.
    """

    def __init__(self, app: App, token: str | None, open_paths: Iterable[str] = ("/health",)) -> None:
        self._app, self._open = app, frozenset(open_paths)
        self._wanted = None if token is None else token.strip().encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or self._wanted is None or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        if kind.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._wanted):
            await self._app(scope, receive, send)
            return
        what = "The API key is wrong." if given else "An API key is needed: 'Authorization: Bearer KEY'."
        headers = {"WWW-Authenticate": "Bearer"}
        await send_problem(send, Problem(401, what, code="invalid_api_key", headers=headers))


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """A request's body.

    Raises:
        Problem: 413, it is longer than ``limit`` bytes, or says so.
        ClientGone: before it was whole.
    """
    stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    too_long = Problem(413, f"The body is longer than {limit} bytes.", headers={"Connection": "close"})
    if stated.isdigit() and int(stated) > limit:
        raise too_long
    parts: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        length += len(part)
        if length > limit:
            raise too_long
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_json(send: Send, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """A whole JSON answer."""
    named = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, problem: Problem) -> None:
    """A refusal."""
    await send_json(send, problem.encoded(), problem.status, problem.headers)
