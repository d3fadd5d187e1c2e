"""HTTP calls to a vLLM server.

Token ids go in and come out as numbers (``/inference/v1/generate``): no text is made of them on the way. A request that gets no
answer, or one that says "later", is sent once more; what changes weights never is.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

from halfbyte.rollout.vllm.errors import VllmError

__all__ = ["VllmClient"]

_LATER = {408, 425, 429, 502, 503, 504}
_UPDATE_SECONDS = 3600.0  # an update of a large model loads it from the host again


class VllmClient:
    """Calls one server. Safe to use from several threads.

    Arguments:
        url: the server's address, ``http://host:port``.
        timeout: seconds until a generation counts as lost.
        api_key: sent as bearer token. vLLM asks for it on ``/v1`` and ``/inference`` only: the calls that change weights must
            be protected by the network.
        sleep: waits before the second try.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600.0,
        api_key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise VllmError(f"{url!r} is not an HTTP address", where="rollout.url", expected="http://host:port")
        self.url, self.timeout, self.sleep = url.rstrip("/"), timeout, sleep
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __repr__(self) -> str:
        return f"VllmClient({self.url!r})"

    # ---- what every vLLM server answers

    def healthy(self) -> bool:
        """Whether the server says it can serve now."""
        try:
            self._send("GET", "/health", None, 10.0)
        except VllmError:
            return False
        return True

    def version(self) -> str:
        """vLLM's version."""
        return str(self._mapping("GET", "/version").get("version"))

    def max_length(self) -> int:
        """The longest sequence it was started for.

        Raises:
            VllmError: the server does not say.
        """
        rows = self._mapping("GET", "/v1/models").get("data")
        length = rows[0].get("max_model_len") if isinstance(rows, list) and rows and isinstance(rows[0], dict) else None
        if not isinstance(length, int):
            raise VllmError("the server does not say its longest sequence", where=f"{self.url}/v1/models")
        return length

    def generate(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Continue a prompt; the answer as it came."""
        body = {"token_ids": list(token_ids), "sampling_params": dict(sampling)}
        return self._mapping("POST", "/inference/v1/generate", body, retry=True)

    # ---- calls of VLLM_SERVER_DEV_MODE=1

    def rpc(self, method: str, *arguments: str, timeout: float = _UPDATE_SECONDS) -> list[Any]:
        """Call a method of every worker; one result a worker."""
        body = {"method": method, "args": list(arguments)}
        answer = self._send("POST", "/collective_rpc", body, timeout)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results:
            raise VllmError(f"{method} has no results", where=f"{self.url}/collective_rpc", expected="one a worker")
        return results

    def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        """Draw no tokens until :meth:`resume`. ``abort`` ends requests in flight with the tokens they have."""
        self._send("POST", f"/pause?{urlencode({'mode': mode})}", {}, self.timeout)

    def resume(self) -> None:
        """Draw tokens again."""
        self._send("POST", "/resume", {}, self.timeout)

    def paused(self) -> bool:
        """Whether it draws no tokens now."""
        return self._mapping("GET", "/is_paused").get("is_paused") is True

    def reset_prefix_cache(self) -> None:
        """Forget keys and values computed under other weights.

        Raises:
            VllmError: blocks are in use.
        """
        answer = self._send("POST", "/reset_prefix_cache", {}, self.timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise VllmError("the prefix cache is in use and was not reset", where=self.url)

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Open the transfer engine."""
        self._send("POST", "/init_weight_transfer_engine", {"init_info": dict(info)}, _UPDATE_SECONDS)

    def start_update(self) -> None:
        """First step of an update."""
        self._send("POST", "/start_weight_update", {}, _UPDATE_SECONDS)

    def update(self, info: Mapping[str, Any]) -> None:
        """Second step: fetch, check and load."""
        self._send("POST", "/update_weights", {"update_info": dict(info)}, _UPDATE_SECONDS)

    def finish_update(self, version: int) -> None:
        """Last step: tokens are stamped with ``version`` from now on."""
        self._send("POST", "/finish_weight_update", {"weight_version": str(version)}, _UPDATE_SECONDS)

    def label(self, version: int) -> None:
        """Stamp tokens with ``version``; the weights stay."""
        self._send("POST", "/update_weight_version", {"new_version": str(version)}, self.timeout)

    # ---- the wire

    def _mapping(self, verb: str, path: str, body: object = None, *, retry: bool = False) -> dict[str, Any]:
        answer = self._send(verb, path, body, self.timeout, retry=retry or verb == "GET")
        if not isinstance(answer, dict):
            raise VllmError("the answer is not a JSON object", where=f"{self.url}{path}")
        return answer

    def _send(self, verb: str, path: str, body: object, timeout: float, *, retry: bool = False) -> Any:
        try:
            return self._once(verb, path, body, timeout)
        except _LostError as error:
            if not retry:
                raise
            first = error
        self.sleep(0.5)
        try:
            return self._once(verb, path, body, timeout)
        except _LostError as error:
            raise VllmError(
                f"{error.what}; the first try: {first.what}", where=error.where, expected=error.expected, fix=error.fix
            ) from error

    def _once(self, verb: str, path: str, body: object, timeout: float) -> Any:
        where = f"{verb} {self.url}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, self._headers, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error, where) from None
        except (OSError, http.client.HTTPException) as error:  # URLError, time-outs, broken connections
            raise _LostError(f"no answer: {error}", where=where, fix="is the server running? see its log") from error
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise _LostError("the answer is not JSON", where=where) from error


class _LostError(VllmError):
    """The same request may succeed when it is sent again."""


def _refused(error: urllib.error.HTTPError, where: str) -> VllmError:
    text = error.read(1 << 16).decode(errors="replace")
    try:
        says = json.loads(text)
        message = says["error"]["message"] if "error" in says else says.get("detail", text)
    except (ValueError, KeyError, TypeError, AttributeError):
        message = text
    what = f"HTTP {error.code}: {str(message)[:500] or error.reason}"
    if error.code in _LATER:
        return _LostError(what, where=where)
    if error.code == 404 and "/v1/" not in where:
        return VllmError(
            what,
            where=where,
            fix="start the server with VLLM_SERVER_DEV_MODE=1; it opens the calls that change weights",
        )
    if error.code == 404:
        return VllmError(what, where=where, fix="start the server with --enable-scale-out")
    if error.code == 500 and "EngineCore" in what:
        return VllmError(what, where=where, fix="the engine process has died; start the server again and see its log")
    return VllmError(what, where=where)
