"""The servers of a trial: a URL that answers already, or a process that the trial starts, waits for, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import halfbyte
from halfbyte.errors import ConfigError
from halfbyte.trial.blocks import EngineFigures
from halfbyte.trial.client import Client, Endpoint
from halfbyte.trial.errors import UnavailableError
from halfbyte.trial.metrics import engine_figures
from halfbyte.trial.settings import Target

__all__ = ["Server", "command_line", "token"]

_POLL = 0.1
_GRACE = 20.0  # seconds between asking a server to stop and making it
_TAIL = 12
_PR_SET_PDEATHSIG = 1


class Server:
    """One target.

    Arguments:
        name: ``baseline`` or ``candidate``, for messages and the log's name.
        folder: of trial.toml; commands run there, and ``logs/NAME.log`` takes their output.
    """

    def __init__(self, name: str, target: Target, folder: Path, client: Client) -> None:
        self.name, self.target = name, target
        self.version = ""
        self._folder, self._client = folder, client
        self._process: subprocess.Popen[bytes] | None = None
        self._endpoint: Endpoint | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens; only after :meth:`start`."""
        assert self._endpoint is not None
        return self._endpoint

    @property
    def pid(self) -> int | None:
        """Of the process the trial started; None for a URL."""
        return None if self._process is None else self._process.pid

    @property
    def up(self) -> bool:
        """It was started and has not died since."""
        return self._endpoint is not None and (self._process is None or self._process.poll() is None)

    async def start(self) -> float:
        """Make sure that it answers and serves the model; returns the seconds that took.

        Raises:
            UnavailableError: it does not come up, or does not list the model; with the end of its log.
        """
        clock = time.monotonic()
        headers = token(self.target, self.name)
        try:
            if self.target.url is not None:
                base = self.target.url
            else:
                port = _free_port()
                self._launch(port)
                base = f"http://127.0.0.1:{port}/v1"
                await self._healthy(base.removesuffix("/v1"), headers)
            self._endpoint = Endpoint(base, await self._model(base, headers), headers)
        except BaseException:
            await self.stop()
            raise
        status, text = await self._client.get(f"{self.endpoint.root}/version", headers)
        self.version = _version(text) if status == 200 else ""
        return time.monotonic() - clock

    async def stop(self) -> None:
        """Ask a started process to end, with all its children, and make it after 20 seconds. A URL is left alone."""
        process, self._process, self._endpoint = self._process, None, None
        if process is None:
            return
        for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
            _signal_group(process.pid, number)
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL / 2)
        _signal_group(process.pid, signal.SIGKILL)  # children that outlived their parent
        process.wait()

    async def reset_cache(self) -> bool:
        """Empty the prefix cache by the server's own endpoint (vLLM's, SGLang's); whether it has one."""
        for path in ("/reset_prefix_cache", "/flush_cache"):
            status, _ = await self._client.post(f"{self.endpoint.root}{path}", self.endpoint.headers)
            if status == 200:
                return True
        return False

    async def figures(self) -> EngineFigures:
        """What its /metrics says now; nothing where it has none."""
        status, text = await self._client.get(f"{self.endpoint.root}/metrics", self.endpoint.headers)
        return engine_figures(text) if status == 200 else EngineFigures()

    def _launch(self, port: int) -> None:
        command = command_line(self.target, port)
        logs = self._folder / "logs"
        logs.mkdir(exist_ok=True)
        self._log = logs / f"{self.name}.log"
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=self._folder,
                    env=_environment(self.target),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_dies_with_parent(),
                )
            except OSError as error:
                what = f"the {self.name} server cannot be started: {error.strerror or error}"
                raise UnavailableError(what, where=f"{self.name}.serve: {command[0]}") from error

    async def _healthy(self, root: str, headers: dict[str, str]) -> None:
        deadline = time.monotonic() + self.target.start_timeout
        while True:
            for path in ("/health", "/v1/models"):
                if (await self._client.get(root + path, headers))[0] == 200:
                    return
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                raise self._down(f"ended with code {code} before it was healthy")
            if time.monotonic() > deadline:
                raise self._down(f"was not healthy after {self.target.start_timeout:g} s")
            await asyncio.sleep(_POLL)

    def _down(self, what: str) -> UnavailableError:
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        shown = "\n".join(f"    {line}" for line in tail)
        return UnavailableError(f"the {self.name} server {what}", where=f"{self._log}; its last lines:\n{shown}")

    async def _model(self, base: str, headers: dict[str, str]) -> str:
        status, text = await self._client.get(f"{base}/models", headers)
        where = f"{self.name}: {base}/models"
        if status != 200:
            said = f"status {status}: {text[:200]}" if status else text
            raise UnavailableError(f"the {self.name} server does not list its models ({said})", where=where)
        names = _names(text)
        wanted = self.target.model
        if wanted is not None and wanted not in names:
            what = f"the {self.name} server does not serve {wanted!r}"
            raise UnavailableError(
                what, where=where, expected=f"{self.name}.model: one of {', '.join(names) or 'none'}"
            )
        if wanted is None and len(names) != 1:
            what = f"the {self.name} server lists {len(names)} models"
            raise UnavailableError(what, where=where, fix=f"set {self.name}.model to one of {', '.join(names)}")
        return wanted or names[0]


def command_line(target: Target, port: int) -> list[str]:
    """The command that starts a target; ``halfbyte`` is this Python's."""
    values = {"{port}": str(port)}
    if target.kv_memory_mb is not None:
        values["{kv_memory_mb}"] = f"{target.kv_memory_mb:g}"
    parts = []
    for part in target.serve or ():
        for name, value in values.items():
            part = part.replace(name, value)
        parts.append(part)
    return [sys.executable, "-m", "halfbyte", *parts[1:]] if parts[0] == "halfbyte" else parts


def token(target: Target, name: str) -> dict[str, str]:
    """Headers with the bearer token, if the target has one.

    Raises:
        ConfigError: its variable is not set.
    """
    if target.api_key_env is None:
        return {}
    if not (value := os.environ.get(target.api_key_env)):
        raise ConfigError(f"the variable {target.api_key_env} is not set", where=f"{name}.api_key_env")
    return {"Authorization": f"Bearer {value}"}


def _environment(target: Target) -> dict[str, str]:
    """Ours and the target's; relative module paths must not follow the change of folder, and halfbyte is found as we are."""
    values = dict(os.environ)
    places = [str(Path(part).resolve()) for part in values.get("PYTHONPATH", "").split(os.pathsep) if part]
    if target.serve is not None and target.serve[0] == "halfbyte":
        places.append(str(Path(halfbyte.__file__).resolve().parents[1]))
    if places:
        values["PYTHONPATH"] = os.pathsep.join(places)
    return values | target.environment


def _dies_with_parent() -> Callable[[], None] | None:
    """For the child: on Linux, SIGTERM when the trial is killed, so that no server outlives a kill -9."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _names(text: str) -> list[str]:
    data = _json(text).get("data")
    return (
        [m["id"] for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]
        if isinstance(data, list)
        else []
    )


def _version(text: str) -> str:
    value = _json(text).get("version", text)
    return str(value).strip()[:120]


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
