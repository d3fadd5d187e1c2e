"""A vLLM server of our own: started with what the engine needs, stopped with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket

from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.errors import VllmError
from halfbyte.rollout.vllm.handshake import BACKEND, EXTENSION

__all__ = ["ENVIRONMENT", "VllmServer", "arguments"]

#: What a server needs in its environment.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def arguments(model: str, *, port: int, max_length: int | None = None, host: str = "127.0.0.1") -> list[str]:
    """Command-line arguments that the engine relies on."""
    out = [
        "--model", model, "--host", host, "--port", str(port),
        "--dtype", "bfloat16",
        "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm",
        "--enable-scale-out",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--worker-extension-cls", EXTENSION,
        "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}',
    ]  # fmt: skip
    return out if max_length is None else [*out, "--max-model-len", str(max_length)]


class VllmServer:
    """Starts a server and waits until it answers.

    Arguments:
        python: interpreter of the environment that holds vLLM and halfbyte.
        model: folder (or hub name) to start from.
        log: file for what it says.
        max_length: longest sequence; None takes the model's.
        extra: more arguments.
        environment: more variables.
        patience: seconds until it has to answer.
    Raises:
        VllmError: it ended, or did not answer in time; with the end of its log.
    """

    def __init__(
        self,
        python: str,
        model: str,
        log: Path,
        *,
        max_length: int | None = None,
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        patience: float = 600.0,
    ) -> None:
        port = _free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        command += [*arguments(model, port=port, max_length=max_length), *extra]
        with log.open("wb") as out:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **ENVIRONMENT, **(environment or {})},
                    start_new_session=True,  # so that its children can be ended with it
                )
            except OSError as error:
                raise VllmError(
                    f"the server cannot be started: {error.strerror}",
                    where=python,
                    fix="give the interpreter of the environment that holds vLLM (docs/vllm.md)",
                ) from error
        try:
            self._wait(patience)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it and all its processes; also twice."""
        for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        # the leader is gone; workers of its session may still be ending, and SIGKILL has reached them by now

    def _wait(self, patience: float) -> None:
        client, end = VllmClient(self.url), time.monotonic() + patience
        while not client.healthy():
            if self.process.poll() is not None:
                raise self._failed(f"the server ended with code {self.process.returncode}")
            if time.monotonic() > end:
                raise self._failed(f"the server did not answer within {patience:.0f} s")
            time.sleep(0.5)

    def _failed(self, what: str) -> VllmError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        wanted = [line for line in lines if "Error" in line][-3:] or lines[-3:]
        return VllmError(
            what + "".join(f"\n    {line[-300:]}" for line in wanted),
            where=str(self.log),
            fix="give an interpreter whose environment holds vLLM and halfbyte (docs/vllm.md); the log has the rest",
        )


def _free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
