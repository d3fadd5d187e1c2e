"""What went wrong with a request, as OpenAI's clients expect to read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["Problem"]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Problem(Exception):
    """A refusal or a failure.

    Arguments:
        status: HTTP status.
        message: one sentence for the person behind the client.
        param: the parameter concerned.
        code: OpenAI's code where there is one, such as ``context_length_exceeded``.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """Its bytes, in ASCII: a message may quote anything."""
        return json.dumps(self.body()).encode("ascii")
