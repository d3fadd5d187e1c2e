"""The scripted server without threads: it answers in the event loop that its client runs in, so that the two take turns.

A request then costs what its code costs, however busy the machine is, and a simulated clock has one reader at a time.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fake_server import FakeServer


class _Connection:
    """What a request handler takes for a socket: the request is all there, the response is collected."""

    def __init__(self, request: bytes) -> None:
        self._request, self.response = request, bytearray()

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._request)

    def sendall(self, data: bytes) -> None:
        self.response += data


@asynccontextmanager
async def in_this_loop(fake: FakeServer) -> AsyncIterator[FakeServer]:
    """Serve ``fake`` (not entered itself) until the block ends. A script that sleeps or hangs would stop the loop."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in head.splitlines()[1:] if line)
        connection = _Connection(head + await reader.readexactly(int(fields.get(b"content-length", b"0"))))
        fake.server.RequestHandlerClass(connection, ("127.0.0.1", 0), fake.server)  # type: ignore[arg-type]
        writer.write(bytes(connection.response))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, sock=fake.server.socket)
    try:
        yield fake
    finally:
        server.close()
        await server.wait_closed()
