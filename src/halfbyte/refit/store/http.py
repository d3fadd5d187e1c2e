"""A store behind HTTP(S), for reading: any static file server or bucket address that answers GET and Range."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from halfbyte.refit.errors import ObjectMissingError, StoreConflictError, StoreError, StoreUnavailableError
from halfbyte.refit.store.protocol import Cell, check_key

__all__ = ["HttpStore"]

_CHUNK = 1 << 20
_LATER = {408, 425, 429, 500, 502, 503, 504}


class _BehindTheEnd(StoreError):
    """HTTP 416."""


class HttpStore:
    """Reads ``base/key``. A body that breaks off is continued with a Range request from where it broke.

    Arguments:
        base: ``http://`` or ``https://`` address of the store's root.
        timeout: seconds without a byte before the server counts as unavailable.
        headers: sent with every request (authorisation).
    """

    def __init__(self, base: str, *, timeout: float = 30.0, headers: dict[str, str] | None = None) -> None:
        if urlsplit(base).scheme not in ("http", "https"):
            raise StoreError(f"{base!r} is not an HTTP address", expected="http:// or https://")
        self.base, self.timeout, self.headers = base.rstrip("/"), timeout, dict(headers or {})

    def __repr__(self) -> str:
        return f"HttpStore({self.base!r})"

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        return self._read(key, limit)[0]

    def get_range(self, key: str, begin: int, end: int) -> bytes:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`."""
        if begin >= end:
            return b""
        try:
            answer = self._open(key, f"bytes={begin}-{end - 1}")
        except _BehindTheEnd:
            return b""
        with answer:
            if answer.status != 206:
                raise StoreError("the server does not answer Range requests", where=f"{self}: {key}")
            return self._body(key, answer, end - begin, bytearray())

    def read_cell(self, key: str) -> Cell | None:
        """See :class:`~halfbyte.refit.store.protocol.ReadStore`. The tag is good for comparing only: HTTP cannot swap."""
        try:
            data, tag = self._read(key, None)
        except ObjectMissingError:
            return None
        return Cell(data, tag)

    def _read(self, key: str, limit: int | None) -> tuple[bytes, str]:
        data = bytearray()
        tag = ""
        while True:
            begun = len(data)
            with self._open(key, f"bytes={begun}-" if begun else None, tag if begun else "") as answer:
                if begun and answer.status != 206:  # replaced meanwhile, or no ranges: from the start
                    data.clear()
                tag = answer.headers.get("ETag", "")
                try:
                    return self._body(key, answer, limit, data), tag
                except StoreUnavailableError:
                    if len(data) == begun:
                        raise  # no progress: the caller decides how often to try

    def _open(self, key: str, span: str | None = None, tag: str = "") -> http.client.HTTPResponse:
        request = urllib.request.Request(f"{self.base}/{check_key(key)}", headers=self.headers)
        request.add_header("Cache-Control", "no-cache")
        if span:
            request.add_header("Range", span)
            if tag:
                request.add_header("If-Range", tag)
        where = f"{self}: {key}"
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self.timeout)
            return answer
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (404, 410):
                    raise ObjectMissingError("the store has no such key", where=where) from None
                if error.code in (409, 412):
                    raise StoreConflictError(f"HTTP {error.code} {error.reason}", where=where) from None
                if error.code == 416:
                    raise _BehindTheEnd("the range begins behind the end", where=where) from None
                if error.code in _LATER:
                    raise StoreUnavailableError(f"HTTP {error.code} {error.reason}", where=where) from None
                raise StoreError(f"HTTP {error.code} {error.reason}", where=where) from None
        except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
            raise StoreUnavailableError(f"no answer: {error}", where=where) from error

    def _body(self, key: str, answer: http.client.HTTPResponse, limit: int | None, into: bytearray) -> bytes:
        """Append the body to ``into`` (what arrived stays there when it breaks off)."""
        length = answer.headers.get("Content-Length")
        expected = len(into) + int(length) if length and length.isdigit() else None
        most = expected if limit is None else limit
        if limit is not None and expected is not None and expected > limit:
            raise StoreError(f"{expected} bytes, at most {limit} are accepted", where=f"{self}: {key}")
        try:
            while chunk := answer.read(_CHUNK):
                into += chunk
                if most is not None and len(into) > most:
                    raise StoreError(f"more than {most} bytes, which is the most accepted", where=f"{self}: {key}")
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailableError(
                f"the answer broke off after {len(into)} bytes", where=f"{self}: {key}"
            ) from error
        if expected is not None and len(into) < expected:
            raise StoreUnavailableError(f"the answer broke off after {len(into)} bytes", where=f"{self}: {key}")
        return bytes(into)
