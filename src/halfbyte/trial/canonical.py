"""One text for one value: canonical JSON and SHA-256, for locks, request digests and the chain of records."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["canonical", "digest", "next_link"]


def canonical(value: Any) -> str:
    """``value`` as JSON with sorted keys and no spaces; the same value gives the same text on every machine.

    Raises:
        ValueError: NaN or infinity, which JSON cannot write.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of :func:`canonical`, hexadecimal; of text and bytes, of themselves."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    text = value if isinstance(value, str) else canonical(value)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def next_link(chain: str, value: Any) -> str:
    """The chain's digest after ``value``: SHA-256 of the digest before it and the value's canonical JSON."""
    return digest(f"{chain}\n{canonical(value)}")
