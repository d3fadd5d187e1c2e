"""A store behind HTTP, for readers on other machines: GET with ranges, and nothing else."""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from halfbyte.refit.errors import ObjectMissingError, StoreError
from halfbyte.refit.store.protocol import ReadStore

__all__ = ["StoreServer"]

_SPAN = re.compile(r"bytes=(\d+)-(\d*)")


class StoreServer:
    """Serves a store to whoever knows the secret; ``HttpStore(server.address, headers=server.headers)`` reads it.

    Arguments:
        store: what is served. Read from several threads.
        host: the interface to listen on, an address that readers can reach. port: 0 lets the system choose.

    Attributes:
        address: ``http://host:port``. headers: what a request must bring.
        bytes_sent: bodies of answers, so far.
    """

    def __init__(self, store: ReadStore, host: str = "127.0.0.1", port: int = 0) -> None:
        self.store, self.bytes_sent = store, 0
        self.headers = {"Authorization": f"Bearer {secrets.token_urlsafe(24)}"}
        self._lock = threading.Lock()
        outer = self

        class Handler(_Handler):
            server_of = outer

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise StoreError(f"cannot listen: {error}", where=f"{host}:{port}") from error
        self._server.daemon_threads = True
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def count(self, sent: int) -> None:
        """Add to ``bytes_sent``."""
        with self._lock:
            self.bytes_sent += sent

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: StoreServer

    def do_GET(self) -> None:
        outer = self.server_of
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), outer.headers["Authorization"].encode()):
            self._answer(401)
            return
        try:
            data = outer.store.get(self.path.removeprefix("/"))
        except ObjectMissingError:
            self._answer(404)
            return
        except StoreError:  # no key at all, or a store that does not answer for now
            self._answer(503)
            return
        span = _SPAN.fullmatch(self.headers.get("Range", ""))
        if span is None:
            self._answer(200, data)
            return
        begin, end = int(span[1]), min(len(data), int(span[2]) + 1 if span[2] else len(data))
        if begin >= len(data):
            self._answer(416)
            return
        self._answer(206, data[begin:end], {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})

    def _answer(self, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.server_of.count(len(body))  # whoever has read it may look at the count
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""
