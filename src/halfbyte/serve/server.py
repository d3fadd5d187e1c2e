"""The server as a process: socket, signals, the line that says it is ready, and the way down."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from halfbyte.errors import ConfigError, MissingExtraError

try:
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn
except ImportError as error:
    raise MissingExtraError(
        f"the server needs {error.name}, which is not installed", fix="pip install 'halfbyte[serve]'"
    ) from error

from halfbyte.refit.manifest import Signer
from halfbyte.refit.store import open_store
from halfbyte.refit.subscriber import Refit
from halfbyte.serve.app import make_app
from halfbyte.serve.follow import Follower
from halfbyte.serve.opening import Opened, open_served
from halfbyte.serve.service import Service
from halfbyte.serve.settings import ServeSettings

__all__ = ["Server", "background", "serve"]

_log = logging.getLogger("halfbyte.serve")
#: Seconds that connections get for their last bytes once no request is being worked on.
_LAST_BYTES = 5


class Server(uvicorn.Server):
    """uvicorn with a drain: the first signal refuses new requests and lets running ones finish, the second one stops.

    Arguments:
        opened: what is served.
        settings: how.
        out: where the ready line goes; None for nowhere.

    Raises:
        ConfigError: the address cannot be listened on.
        UserError: the refit store cannot be opened.
    """

    def __init__(self, opened: Opened, settings: ServeSettings, out: TextIO | None = None) -> None:
        self.service, self.settings, self._out = Service(opened, settings), settings, out
        self.follower = self._follower(opened)
        self.socket = _listen(settings.host, settings.port)
        host, port = self.socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._deadline: float | None = None
        super().__init__(
            uvicorn.Config(
                make_app(self.service),
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_LAST_BYTES,
            )
        )

    def work(self) -> None:
        """Serve until a signal, or :meth:`drain`, and everything after it is done."""
        try:
            self.run(sockets=[self.socket])
        finally:
            self.service.loop.stop()
            if self.follower is not None:
                self.follower.stop()
            self.socket.close()

    def drain(self) -> None:
        """Refuse new requests, finish running ones, then end; from any thread."""
        self._deadline = self._deadline or time.monotonic() + self.settings.drain_seconds
        self.service.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        self.service.start()
        await super().startup(sockets)
        if self.follower is not None:
            self.follower.start()
        if self._out is not None:
            line = {"event": "ready", "url": self.url, "model": self.settings.name, "pid": os.getpid()}
            print(json.dumps(line), file=self._out, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: is the drain over?"""
        if self._deadline is not None and not self.should_exit:
            late = time.monotonic() > self._deadline
            if late:
                self.service.cancel_all()
            self.should_exit = self.service.active == 0 or time.monotonic() > self._deadline + _LAST_BYTES
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal."""
        if self._deadline is None:
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours while serving; afterwards the process ends as programs end that have done their work."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _follower(self, opened: Opened) -> Follower | None:
        settings = self.settings
        if settings.follow is None:
            return None
        signer = None if settings.follow_key is None else Signer(settings.follow_key.read_bytes().strip())
        return Follower(
            open_store(settings.follow),
            opened,
            self.service.loop,
            self._refitted,
            seconds=settings.follow_seconds,
            name=settings.reader,
            signer=signer,
        )

    def _refitted(self, event: Refit | Exception) -> None:
        metrics, failed = self.service.metrics, isinstance(event, Exception)
        metrics.refits.labels("failed" if failed else "taken").inc()
        metrics.refit_failing.set(int(failed))
        if isinstance(event, Refit):
            _log.info("version %d, %.1f ms paused", event.target.version, 1e3 * event.pause_seconds)


def serve(settings: ServeSettings, out: TextIO = sys.stdout) -> None:
    """Serve until a signal. One line of JSON on ``out`` says where, once requests are taken.

    Raises:
        UserError: the model, the address or the store cannot be used.
    """
    server = Server(open_served(settings), settings, out)
    if settings.api_key is None and not _is_local(server.socket):
        _log.warning("anybody who reaches %s may use this server: it was given no --api-key", server.url)
    server.work()


@contextmanager
def background(settings: ServeSettings, opened: Opened | None = None) -> Iterator[Server]:
    """A server in a thread of this process, taking requests; it is drained at the end.

    Arguments:
        opened: what to serve; by default the model of ``settings``.
    """
    server = Server(opened or open_served(settings), settings)
    thread = threading.Thread(target=server.work, name="halfbyte-serve", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield server
    finally:
        server.drain()
        thread.join()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen there: {error.strerror or error}",
            where=f"{host}:{port}",
            expected="an address of this machine and a free port",
            fix="--port 0 takes a port that is free",
        ) from error
    return listener


def _is_local(listener: socket.socket) -> bool:
    host = str(listener.getsockname()[0])
    return host.startswith("127.") or host == "::1"
